"""Parses calls that are written as tags, and makes JSON of their parameters.

A string is streamed. A value of another type is emitted when its closing tag has come, since only then it is certain
whether the text is such a value.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping

from gateway_svc.message_formats.call_ends import parse_end
from gateway_svc.message_formats.description import Tool, XmlCalls
from gateway_svc.message_formats.schema_types import parameter_types, to_json
from gateway_svc.message_formats.source import ControlMarker, NotACall, Parse, TurnSource
from gateway_svc.message_formats.writer import EventWriter

_NAME = re.compile(r"[^>\n]+")
_IN_VALUE = re.compile(r"[^<\n]+")


def parse_xml_calls(source: TurnSource, calls: XmlCalls, writer: EventWriter, tools: Mapping[str, Tool]) -> Parse[None]:
    """Calls after their first marker. Raises NotACall where something else follows, after a call too."""
    while True:
        yield from source.expect(calls.function)
        name = yield from _parse_name(source)
        writer.begin_call(name)
        writer.write_arguments("{")
        source.accept()
        yield from _parse_parameters(source, calls, writer, tools.get(name, Tool(name)))
        writer.write_arguments("}")
        writer.end_call()
        source.accept()
        yield from source.read_visible()
        if (yield from parse_end(source, calls.end, writer)):
            return
        source.unread()


def _parse_name(source: TurnSource) -> Parse[str]:
    name = (yield from source.read_run(_NAME)).strip()
    yield from source.expect(">")
    if not name:
        raise NotACall
    return name


def _parse_parameters(source: TurnSource, calls: XmlCalls, writer: EventWriter, tool: Tool) -> Parse[None]:
    """All parameters, with the closing tag of the function."""
    ends = (calls.parameter_end, f"\n{calls.parameter_end}")
    separator = ""

    def write(fragment: str) -> None:
        writer.write_arguments(fragment)
        source.accept()

    def write_string(text: str) -> None:
        write(json.dumps(text, ensure_ascii=False)[1:-1])

    while (yield from source.expect(calls.parameter, calls.function_end)) != calls.function_end:
        name = yield from _parse_name(source)
        types = parameter_types(tool.parameters, name)
        key = f"{separator}{json.dumps(name, ensure_ascii=False)}: "
        separator = ", "
        if types == {"string"}:
            write(f'{key}"')
            yield from _copy_value(source, ends, write_string)
            write('"')
        else:
            parts: list[str] = []
            yield from _copy_value(source, ends, parts.append)
            write(key + to_json("".join(parts), types))


def _copy_value(source: TurnSource, ends: Collection[str], sink: Callable[[str], object]) -> Parse[None]:
    """Copies a value up to its closing tag. Raises NotACall at another marker."""
    is_first = True
    while True:
        unit = yield from source.read(_IN_VALUE)
        if (yield from source.match(ends)) is not None:
            return
        if isinstance(unit, ControlMarker):
            source.refuse()
        if not (is_first and unit == "\n"):
            sink(unit)
        is_first = False
