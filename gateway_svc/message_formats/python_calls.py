"""Parses calls that are written as Python, and makes JSON of their arguments.

Strings are streamed. Of expressions, only literals are taken: strings, numbers, True, False, None, lists and dicts.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Collection

from gateway_svc.message_formats.call_ends import parse_end
from gateway_svc.message_formats.description import PythonCalls
from gateway_svc.message_formats.source import ControlMarker, NotACall, Parse, TurnSource
from gateway_svc.message_formats.writer import EventWriter

_NAME = re.compile(r"[\w.-]+")
_IN_STRING = re.compile(r"""[^\\"']+""")
_SCALAR = re.compile(r"[\w.+-]+")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}
_MAX_NUMBER_LENGTH = 100
# A level takes several frames of Python's stack.
_MAX_DEPTH = 32

Sink = Callable[[str], object]


def parse_python_calls(
    source: TurnSource, calls: PythonCalls, writer: EventWriter, known_names: Collection[str] | None
) -> Parse[None]:
    """A list of calls after the first marker; or, where `known_names` is given, calls of these tools without a marker.

    Raises NotACall where something else follows, after a call too.
    """
    if not calls.is_list:
        yield from _parse_lines(source, calls, writer)
        return
    yield from source.expect("[")
    yield from _parse_items(source, "]", lambda: _parse_call(source, writer, known_names))
    source.accept()
    if known_names is None:
        yield from source.expect(calls.end)
        writer.add_marker()
        source.accept()


def _parse_lines(source: TurnSource, calls: PythonCalls, writer: EventWriter) -> Parse[None]:
    """Calls up to the second marker."""
    while True:
        yield from source.read_visible()
        if (yield from parse_end(source, calls.end, writer)):
            return
        yield from _parse_call(source, writer, None)
        source.accept()


def _parse_items(source: TurnSource, closing: str, parse_item: Callable[[], Parse[None]]) -> Parse[None]:
    """Items that commas divide, up to the closing bracket. An item begins with the unit that was read last."""
    unit = yield from source.read_visible()
    while unit != closing:
        yield from parse_item()
        unit = yield from source.read_visible()
        if unit == ",":
            unit = yield from source.read_visible()
        elif unit != closing:
            source.refuse()


def _parse_call(source: TurnSource, writer: EventWriter, known_names: Collection[str] | None) -> Parse[None]:
    name = yield from _parse_name(source)
    if known_names is not None and name not in known_names:
        raise NotACall
    yield from source.expect("(")
    separator = ""

    def write(fragment: str) -> None:
        writer.write_arguments(fragment)
        source.accept()

    def parse_argument() -> Parse[None]:
        nonlocal separator
        key = yield from _parse_name(source)
        yield from source.expect("=")
        write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from source.read_visible()
        yield from _copy_value(source, write, 0)

    writer.begin_call(name)
    write("{")
    yield from _parse_items(source, ")", parse_argument)
    write("}")
    writer.end_call()


def _parse_name(source: TurnSource) -> Parse[str]:
    source.unread()
    name = yield from source.read_run(_NAME)
    if not name:
        raise NotACall
    return name


def _copy_value(source: TurnSource, sink: Sink, depth: int) -> Parse[None]:
    """Copies a value as JSON. It begins with the unit that was read last. Raises NotACall where it is no literal."""
    if depth > _MAX_DEPTH:
        raise NotACall
    first = source.last
    num_items = 0

    def copy_item() -> Parse[None]:
        nonlocal num_items
        separator = ", " if num_items else ""
        num_items += 1

        def write(text: str) -> None:
            # The separator comes with the item: what is no literal must be put back, and nothing written yet.
            nonlocal separator
            sink(separator + text)
            separator = ""

        if first == "{":
            if source.last not in ('"', "'"):
                source.refuse()
            yield from _copy_string(source, write)
            yield from source.expect(":")
            sink(": ")
            yield from source.read_visible()
        yield from _copy_value(source, write, depth + 1)

    if first in ("[", "{"):
        closing = "]" if first == "[" else "}"
        sink(first)
        yield from _parse_items(source, closing, copy_item)
        sink(closing)
    elif first in ('"', "'"):
        yield from _copy_string(source, sink)
    elif isinstance(first, ControlMarker) or not _SCALAR.fullmatch(first):
        source.refuse()
    else:
        rest = yield from source.read_run(_SCALAR)
        sink(_scalar_to_json(first + rest))


def _scalar_to_json(text: str) -> str:
    """The JSON of a word or number. Raises NotACall."""
    if text in _WORDS:
        return _WORDS[text]
    if _JSON_NUMBER.fullmatch(text):
        return text
    try:
        value = ast.literal_eval(text) if len(text) <= _MAX_NUMBER_LENGTH else None
    except (ValueError, SyntaxError):
        raise NotACall from None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise NotACall
    return json.dumps(value)


def _copy_string(source: TurnSource, sink: Sink) -> Parse[None]:
    """Copies a string as JSON. Its opening quote was read last; there may be three."""
    quote = source.last
    is_triple = False
    if (yield from source.read()) != quote:
        source.unread()
    elif (yield from source.read()) == quote:
        is_triple = True
    else:
        source.unread()
        sink('""')
        return
    sink('"')
    while True:
        unit = yield from source.read_text(_IN_STRING)
        if unit == "\\":
            sink((yield from _parse_escape(source)))
        elif unit == quote and (not is_triple or (yield from _is_end_of_triple(source, quote))):
            sink('"')
            return
        else:
            sink(_to_json(unit))


def _is_end_of_triple(source: TurnSource, quote: str) -> Parse[bool]:
    """Whether two more quotes follow the one that was read last. If not, none of them is read."""
    for num_read in (1, 2):
        if (yield from source.read()) != quote:
            for _ in range(num_read):
                source.unread()
            return False
    return True


def _parse_escape(source: TurnSource) -> Parse[str]:
    """What an escape stands for, in a JSON string. Its backslash was read last."""
    kind = yield from source.read_text()
    if kind in _CODE_LENGTHS:
        digits = ""
        for _ in range(_CODE_LENGTHS[kind]):
            digits += yield from source.read_text()
        try:
            code = int(digits, 16)
            # Two surrogates of a pair are one character in JSON.
            return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else _to_json(chr(code))
        except (ValueError, OverflowError):
            raise NotACall from None
    if kind in ("\\", "'", '"'):
        return _to_json(kind)
    return _to_json(_ESCAPES.get(kind, f"\\{kind}"))


def _to_json(text: str) -> str:
    """A part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
