"""Parses calls whose name stands as plain text before the arguments."""

import re

from gateway_svc.message_formats.call_ends import parse_end
from gateway_svc.message_formats.description import JsonCalls, NamedCalls, Slot
from gateway_svc.message_formats.json_calls import parse_arguments, parse_json_calls
from gateway_svc.message_formats.source import NotACall, Parse, TurnSource
from gateway_svc.message_formats.writer import EventWriter

# Names end where white space, a marker or JSON begins.
_WORD = re.compile(r"[^\s<>\[\]{}\"'`|]+")
_NUMBER = re.compile(r":\d*$")


def parse_named_calls(source: TurnSource, calls: NamedCalls, writer: EventWriter) -> Parse[None]:
    """Calls after their first marker; or, where all calls have only that one, JSON calls, which models of the same
    family wrote before. Raises NotACall where something else follows, after a call too."""
    if calls.end is None:
        unit = yield from source.read_visible()
        source.unread()
        if unit in ("[", "{"):
            yield from parse_json_calls(source, JsonCalls(calls.begin), writer, None)
            return
    while True:
        yield from _parse_call(source, calls, writer)
        source.accept()
        if calls.end is None:
            return
        yield from source.read_visible()
        if (yield from parse_end(source, calls.end, writer)):
            return
        source.unread()


def _parse_call(source: TurnSource, calls: NamedCalls, writer: EventWriter) -> Parse[None]:
    name = ""
    for part in calls.call:
        if part is Slot.NAME:
            yield from source.read_visible()
            source.unread()
            name = (yield from source.read_run(_WORD)).removeprefix(calls.namespace)
            if calls.is_numbered:
                name = _NUMBER.sub("", name)
            if not name:
                raise NotACall
            yield from _skip_ignored(source, calls)
        elif part is Slot.ARGUMENTS:
            if (yield from source.read_visible()) != "{":
                source.refuse()
            yield from parse_arguments(source, writer, name)
        elif isinstance(part, str):
            yield from source.expect(part.strip())


def _skip_ignored(source: TurnSource, calls: NamedCalls) -> Parse[None]:
    if not calls.ignored:
        return
    yield from source.read_visible()
    found = yield from source.match(calls.ignored)
    if found is None:
        source.unread()
    else:
        yield from source.read_run(_WORD)
