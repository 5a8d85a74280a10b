"""Parses calls that are JSON objects, and arguments that are JSON.

Of arguments only strings and brackets are looked at. What a model writes between them is emitted as it is, so that a
client has the whole of arguments that are not quite JSON, as with `True` for `true`.
"""

import json
import re
from collections.abc import Callable, Collection

from gateway_svc.message_formats.call_ends import parse_end
from gateway_svc.message_formats.description import JsonCalls
from gateway_svc.message_formats.source import ControlMarker, NotACall, Parse, TurnSource
from gateway_svc.message_formats.writer import EventWriter

_IN_STRING = re.compile(r'[^"\\]+')
_BETWEEN_BRACKETS = re.compile(r'[^"{}\[\]]+')
_SCALAR = re.compile(r'[^\s,:"{}\[\]]+')
_CLOSING = {"{": "}", "[": "]"}
_ARGUMENTS_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id", "tool_call_id")

Sink = Callable[[str], object]


def parse_json_calls(
    source: TurnSource, calls: JsonCalls, writer: EventWriter, known_names: Collection[str] | None
) -> Parse[None]:
    """Calls after their first marker; or, where `known_names` is given, calls of these tools without a marker.

    Raises NotACall where something else follows, after a call too.
    """
    end = calls.end if known_names is None else None
    unit = yield from source.read_visible()
    while True:
        if unit == "{":
            yield from _parse_call(source, calls, writer, known_names)
        elif unit == "[":
            yield from _parse_array(source, calls, writer, known_names)
        else:
            source.refuse()
        source.accept()
        unit = yield from source.read_visible()
        if (yield from parse_end(source, end, writer)):
            return
        if unit in (",", ";"):
            unit = yield from source.read_visible()


def parse_arguments(source: TurnSource, writer: EventWriter, name: str) -> Parse[None]:
    """A whole call, of which the opening brace of the arguments was read last. Raises NotACall."""
    writer.begin_call(name)

    def write(fragment: str) -> None:
        writer.write_arguments(fragment)
        source.accept()

    yield from _copy_nested(source, write)
    writer.end_call()


def _copy_nested(source: TurnSource, sink: Sink) -> Parse[None]:
    """Copies a JSON object or array, of which the opening bracket was read last.

    Raises NotACall where brackets do not match.
    """
    expected = [_CLOSING[source.last]]
    sink(source.last)
    while expected:
        unit = yield from source.read_text(_BETWEEN_BRACKETS)
        if unit == '"':
            yield from copy_string(source, sink)
            continue
        if unit in _CLOSING:
            expected.append(_CLOSING[unit])
        elif unit in ("}", "]") and unit != expected.pop():
            source.refuse()
        sink(unit)


def copy_string(source: TurnSource, sink: Sink) -> Parse[None]:
    """Copies a JSON string, of which the opening quote was read last."""
    sink('"')
    while True:
        unit = yield from source.read_text(_IN_STRING)
        sink(unit)
        if unit == "\\":
            unit = yield from source.read_text()
            sink(unit)
        elif unit == '"':
            return


def _parse_array(
    source: TurnSource, calls: JsonCalls, writer: EventWriter, known_names: Collection[str] | None
) -> Parse[None]:
    """An array of calls, of which the opening bracket was read last. An empty one is no call and no text."""
    unit = yield from source.read_visible()
    while unit != "]":
        if unit != "{":
            source.refuse()
        yield from _parse_call(source, calls, writer, known_names)
        source.accept()
        unit = yield from source.read_visible()
        if unit == ",":
            unit = yield from source.read_visible()


def _parse_call(
    source: TurnSource, calls: JsonCalls, writer: EventWriter, known_names: Collection[str] | None
) -> Parse[None]:
    """A call, of which the opening brace was read last. It begins once its name and the beginning of its arguments are
    known; without arguments they are `{}`."""
    name: str | None = None
    arguments: str | None = None
    is_written = False
    unit = yield from source.read_visible()
    if not calls.name_key:
        yield from _parse_call_by_name(source, writer)
        return
    while unit != "}":
        key = yield from _parse_string(source)
        if known_names is not None and key not in ("name", *_ARGUMENTS_KEYS, *_OTHER_KEYS):
            # JSON that is an answer would otherwise be held back until its end.
            raise NotACall
        yield from source.expect(":")
        unit = yield from source.read_visible()
        if key in ("name", calls.name_key) and name is None:
            name = yield from _parse_name(source)
            if known_names is not None and name not in known_names:
                raise NotACall
        elif key not in _ARGUMENTS_KEYS or is_written or arguments is not None:
            yield from _skip_value(source)
        elif unit == "{" and name is not None:
            yield from parse_arguments(source, writer, name)
            is_written = True
        else:
            arguments = yield from _parse_early_arguments(source)
        unit = yield from source.read_visible()
        if unit == ",":
            unit = yield from source.read_visible()
        elif unit != "}":
            source.refuse()
    if name is None:
        raise NotACall
    if not is_written:
        writer.begin_call(name)
        writer.write_arguments(arguments or "{}")
        writer.end_call()


def _parse_call_by_name(source: TurnSource, writer: EventWriter) -> Parse[None]:
    """A call after its opening brace: the name with the arguments. The first unit was read."""
    name = yield from _parse_name(source)
    yield from source.expect(":")
    if (yield from source.read_visible()) != "{":
        source.refuse()
    yield from parse_arguments(source, writer, name)
    yield from source.expect("}")


def _parse_name(source: TurnSource) -> Parse[str]:
    """The name of a function, a string of which the opening quote was read last."""
    name = yield from _parse_string(source)
    # Not printable are also halves of surrogate pairs, which no encoding has.
    if not name or not name.isprintable():
        raise NotACall
    return name


def _parse_early_arguments(source: TurnSource) -> Parse[str]:
    """Arguments that are not streamed: those before the name, null, and those that are a string with an object."""
    if source.last == "{":
        parts: list[str] = []
        yield from _copy_nested(source, parts.append)
        return "".join(parts)
    if source.last == '"':
        text = yield from _parse_string(source)
        if _is_object(text):
            return text
        raise NotACall
    if (yield from _parse_scalar(source)) != "null":
        raise NotACall
    return "{}"


def _is_object(text: str) -> bool:
    try:
        # Without halves of surrogate pairs, which no encoding has.
        return isinstance(json.loads(text.encode()), dict)
    except (ValueError, RecursionError):
        return False


def _skip_value(source: TurnSource) -> Parse[None]:
    if source.last in _CLOSING:
        yield from _copy_nested(source, len)
    elif source.last == '"':
        yield from copy_string(source, len)
    else:
        yield from _parse_scalar(source)


def _parse_scalar(source: TurnSource) -> Parse[str]:
    """A number or a word, of which the first character was read last."""
    first = source.last
    if isinstance(first, ControlMarker) or not _SCALAR.fullmatch(first):
        source.refuse()
    return first + (yield from source.read_run(_SCALAR))


def _parse_string(source: TurnSource) -> Parse[str]:
    """The value of a string, of which the opening quote was read last. Raises NotACall."""
    if source.last != '"':
        source.refuse()
    parts: list[str] = []
    yield from copy_string(source, parts.append)
    try:
        # Not strict: models write line breaks in strings.
        return str(json.loads("".join(parts), strict=False))
    except ValueError as error:
        raise NotACall from error
