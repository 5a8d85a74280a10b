"""Parses calls whose arguments stand in braces with bare keys, and makes JSON of them.

Strings are streamed. A bare value that is no JSON is a string.
"""

import json
import re
from collections.abc import Callable

from gateway_svc.message_formats.call_ends import parse_end
from gateway_svc.message_formats.description import BraceCalls
from gateway_svc.message_formats.json_calls import copy_string
from gateway_svc.message_formats.schema_types import ALL_TYPES, to_json
from gateway_svc.message_formats.source import ControlMarker, NotACall, Parse, TurnSource, run_without
from gateway_svc.message_formats.writer import EventWriter

_NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r"[^:,{}\[\]<\n]+")
_BARE = re.compile(r"[^,{}\[\]<\n]+")
# A level takes several frames of Python's stack.
_MAX_DEPTH = 32

Sink = Callable[[str], object]


def parse_brace_calls(source: TurnSource, calls: BraceCalls, writer: EventWriter) -> Parse[None]:
    """Calls after their first marker. Raises NotACall where something else follows, after a call too."""

    def write(fragment: str) -> None:
        writer.write_arguments(fragment)
        source.accept()

    while True:
        yield from source.expect(calls.prefix)
        name = yield from source.read_run(_NAME)
        if not name:
            raise NotACall
        yield from source.expect("{")
        writer.begin_call(name)
        yield from _copy_object(source, calls, write, 0)
        writer.end_call()
        source.accept()
        yield from source.read_visible()
        if (yield from parse_end(source, calls.end, writer)):
            return
        source.unread()


def _copy_object(source: TurnSource, calls: BraceCalls, sink: Sink, depth: int) -> Parse[None]:
    """Copies an object as JSON. Its opening brace was read last."""
    sink("{")
    separator = ""
    unit = yield from source.read_visible()
    while unit != "}":
        key = yield from _parse_key(source, calls)
        yield from source.expect(":")
        sink(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from source.read_visible()
        yield from _copy_value(source, calls, sink, depth + 1)
        unit = yield from _next_item(source, "}")
    sink("}")


def _copy_list(source: TurnSource, calls: BraceCalls, sink: Sink, depth: int) -> Parse[None]:
    """Copies a list as JSON. Its opening bracket was read last."""
    separator = ""

    def write(text: str) -> None:
        # The separator comes with the item: what is no value must be put back, and nothing written yet.
        nonlocal separator
        sink(separator + text)
        separator = ""

    sink("[")
    unit = yield from source.read_visible()
    while unit != "]":
        yield from _copy_value(source, calls, write, depth + 1)
        separator = ", "
        unit = yield from _next_item(source, "]")
    sink("]")


def _next_item(source: TurnSource, closing: str) -> Parse[str]:
    """The first unit of the next item, or the closing bracket."""
    unit = yield from source.read_visible()
    if unit == ",":
        return (yield from source.read_visible())
    if unit != closing:
        source.refuse()
    return unit


def _parse_key(source: TurnSource, calls: BraceCalls) -> Parse[str]:
    """A key, of which the first unit was read last."""
    if (yield from source.match((calls.quote,))) is not None:
        parts: list[str] = []
        yield from _copy_text(source, calls, parts.append)
        return "".join(parts)
    source.unread()
    key = (yield from source.read_run(_KEY)).strip()
    if not key:
        raise NotACall
    return key


def _copy_value(source: TurnSource, calls: BraceCalls, sink: Sink, depth: int) -> Parse[None]:
    """Copies a value as JSON. It begins with the unit that was read last."""
    if depth > _MAX_DEPTH:
        raise NotACall
    first = source.last
    if first == "{":
        yield from _copy_object(source, calls, sink, depth)
    elif first == "[":
        yield from _copy_list(source, calls, sink, depth)
    elif first == '"':
        yield from copy_string(source, sink)
    elif (yield from source.match((calls.quote,))) is not None:
        sink('"')
        yield from _copy_text(source, calls, lambda text: sink(json.dumps(text, ensure_ascii=False)[1:-1]))
        sink('"')
    elif isinstance(first, ControlMarker) or not _BARE.fullmatch(first):
        source.refuse()
    else:
        sink(to_json((first + (yield from source.read_run(_BARE))).strip(), ALL_TYPES))


def _copy_text(source: TurnSource, calls: BraceCalls, sink: Sink) -> Parse[None]:
    """Copies a text up to the quote that ends it. Raises NotACall at another marker."""
    run = run_without((calls.quote,))
    while True:
        unit = yield from source.read(run)
        if (yield from source.match((calls.quote,))) is not None:
            return
        if isinstance(unit, ControlMarker):
            source.refuse()
        sink(unit)
