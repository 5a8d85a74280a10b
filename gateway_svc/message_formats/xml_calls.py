"""Parses calls that are written as tags, and makes JSON of their parameters.

A string is streamed. A value of another type is emitted when its closing tag has come, since only then it is certain
whether the text is such a value.
"""

import json
import re
from collections.abc import Callable, Mapping

from gateway_svc.message_formats.call_ends import parse_end
from gateway_svc.message_formats.description import Tool, XmlCalls
from gateway_svc.message_formats.schema_types import parameter_types, to_json
from gateway_svc.message_formats.source import ControlMarker, NotACall, Parse, TurnSource
from gateway_svc.message_formats.writer import EventWriter

# Names of parameters, and of functions in tags, end with their tag or the line; others where white space, a marker or
# JSON begins.
_NAME = re.compile(r"[^>\"\n]+")
_KEY_BEFORE_TAG = re.compile(r"[^<>\n]+")
_WORD = re.compile(r"[^\s<>\[\]{}\"'`|]+")
_IN_VALUE = re.compile(r"[^<\n]+")


def parse_xml_calls(
    source: TurnSource, calls: XmlCalls, writer: EventWriter, tools: Mapping[str, Tool], *, is_marked: bool
) -> Parse[None]:
    """Calls after their first marker; or without one, after the beginning of a function's tag: calls of these tools.

    Raises NotACall where something else follows, after a call too.
    """
    is_begun = not is_marked
    while True:
        if not is_begun and calls.function:
            yield from source.expect(calls.function)
        is_begun = False
        name = yield from _parse_function(source, calls)
        if not is_marked and name not in tools:
            raise NotACall
        if not calls.function:  # a name without a tag of its own is one if a tag follows
            source.unread_marker((yield from source.expect(calls.parameter, calls.last_tag)))
        writer.begin_call(name)
        writer.write_arguments("{")
        source.accept()
        yield from _parse_parameters(source, calls, writer, tools.get(name, Tool(name)))
        writer.write_arguments("}")
        writer.end_call()
        source.accept()
        if not calls.function_end:
            return
        yield from source.read_visible()
        if (yield from parse_end(source, calls.end, writer)):
            return
        source.unread()


def _parse_function(source: TurnSource, calls: XmlCalls) -> Parse[str]:
    if not calls.function:
        yield from source.read_visible()
        source.unread()
    name = (yield from source.read_run(_NAME if calls.function else _WORD)).strip()
    if calls.name_end:
        yield from source.expect(calls.name_end)
    if not name:
        raise NotACall
    return name


def _parse_key(source: TurnSource, calls: XmlCalls) -> Parse[str]:
    key = (yield from source.read_run(_KEY_BEFORE_TAG if calls.key_end[0][0] == "<" else _NAME)).strip()
    for literal in calls.key_end:
        yield from source.expect(literal)
    if not key:
        raise NotACall
    return key


def _parse_parameters(source: TurnSource, calls: XmlCalls, writer: EventWriter, tool: Tool) -> Parse[None]:
    """All parameters, with the tag after them."""
    separator = ""

    def write(fragment: str) -> None:
        writer.write_arguments(fragment)
        source.accept()

    def write_string(text: str) -> None:
        write(json.dumps(text, ensure_ascii=False)[1:-1])

    tags = (calls.parameter, calls.last_tag)
    tag = yield from source.expect(*tags)
    while tag != calls.last_tag:
        name = yield from _parse_key(source, calls)
        types = parameter_types(tool.parameters, name)
        key = f"{separator}{json.dumps(name, ensure_ascii=False)}: "
        separator = ", "
        if types == {"string"}:
            write(f'{key}"')
            end = yield from _copy_value(source, calls, write_string)
            write('"')
        else:
            parts: list[str] = []
            end = yield from _copy_value(source, calls, parts.append)
            write(key + to_json("".join(parts), types))
        tag = end if end in tags else (yield from source.expect(*tags))


def _copy_value(source: TurnSource, calls: XmlCalls, sink: Callable[[str], object]) -> Parse[str]:
    """Copies a value up to its closing tag, or to one of the tags that may follow this. Returns the tag.

    Raises NotACall at another marker.
    """
    tags = (calls.parameter, calls.last_tag)
    spelled = (*((f"\n{calls.parameter_end}",) if calls.value_break else ()), *(f"\n{tag}" for tag in tags))
    is_first = True
    while True:
        unit = yield from source.read(_IN_VALUE)
        end = yield from source.match((calls.parameter_end, *spelled, *(tags if calls.has_token_tags else ())))
        if end is not None and end == spelled[-1] and not (yield from _is_function_over(source, calls)):
            for _ in end[1:]:
                source.unread()
            end = None
        if end is not None:
            return end.removeprefix("\n")
        if isinstance(unit, ControlMarker):
            source.refuse()
        if not (is_first and unit == calls.value_break):
            sink(unit)
        is_first = False


def _is_function_over(source: TurnSource, calls: XmlCalls) -> Parse[bool]:
    """Whether the end of the calls or another function comes next, after any white space. It is not read."""
    if not calls.function_end:
        return True
    num_read = 0
    while True:
        unit = yield from source.read()
        num_read += 1
        if not unit.isspace():
            break
    found = yield from source.match((calls.end, calls.function))
    if found is not None and not isinstance(unit, ControlMarker):
        num_read += len(found) - 1
    for _ in range(num_read):
        source.unread()
    return found is not None
