"""Parses turns of messages with headers: reasoning, texts and calls, in any order.

Headers have no text, except that of a call without arguments, and what is none: such as one without its end.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gateway_svc.message_formats.description import Channels, Tool
from gateway_svc.message_formats.json_calls import parse_arguments
from gateway_svc.message_formats.source import NotACall, Parse, TurnSource, run_without
from gateway_svc.message_formats.writer import EventWriter

_MAX_HEADER_LENGTH = 256
"""A longer text without the end of a header is none. Names of functions have at most 64 characters."""


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str
    recipient: str


def parse_messages(
    source: TurnSource,
    channels: Channels,
    writer: EventWriter,
    tools: Mapping[str, Tool],
    *,
    has_reasoning: bool,
    is_open: bool,
) -> Parse[None]:
    """The messages of a turn. Without tools, calls are text; without `has_reasoning` so is reasoning. `is_open`: the
    turn begins within reasoning."""
    writer.in_reasoning = is_open
    while True:
        if not writer.in_reasoning and (header := (yield from _parse_header(source, channels, writer))):
            name = _function(header, channels, tools)
            if name is not None:
                yield from _parse_call(source, channels, writer, name, has_tools=bool(tools))
            else:
                writer.add_marker()
                source.accept()
                writer.in_reasoning = has_reasoning and header.channel == channels.reasoning
            writer.in_header = False
        yield from _copy_text(source, channels, writer)
        writer.in_reasoning = False


def is_header_beginning(text: str, channels: Channels) -> bool:
    """Whether the end of an output is a header of which the rest is missing."""
    words = re.split("|".join((r"\s", *map(re.escape, channels.markers))), text)
    known = (*channels.words, channels.recipient)
    return all(word.startswith(channels.recipient) or any(one.startswith(word) for one in known) for word in words)


def _parse_header(source: TurnSource, channels: Channels, writer: EventWriter) -> Parse[_Header | None]:
    """A header with its end; None: there is none, and what was read is not accepted."""
    markers = (channels.start, channels.channel, channels.constrain, channels.message)
    yield from source.read()
    first = yield from source.match((*markers, channels.recipient, f" {channels.recipient}"))
    if first is None:
        source.unread()
        return None
    writer.in_header = True
    parts = [first]
    while parts[-1] != channels.message:
        unit = yield from source.read()
        end = yield from source.match((*markers, *channels.ends))
        if end in channels.ends or unit == "\n" or len(parts) > _MAX_HEADER_LENGTH:
            source.unread_marker(end or unit)
            writer.in_header = False
            return None
        parts.append(end or unit)
    text = "".join(f" {part} " if part in markers else part for part in parts)
    _, _, channel = text.rpartition(f" {channels.channel} ")
    # Where there are two, the one after the channel counts: grammars have only that one.
    recipients = re.findall(rf"(?<!\S){re.escape(channels.recipient)}(\S+)", text)
    return _Header(next(iter(channel.split()), ""), recipients[-1] if recipients else "")


def _function(header: _Header, channels: Channels, tools: Mapping[str, Tool]) -> str | None:
    """The function that a message calls; None: it is no call. Models leave out the namespace, and there are recipients
    that are no functions."""
    name = header.recipient.removeprefix(channels.namespace)
    return name if name and (name != header.recipient or name in tools) else None


def _parse_call(
    source: TurnSource, channels: Channels, writer: EventWriter, name: str, *, has_tools: bool
) -> Parse[None]:
    """A call after its header, without the end of its message. What is none is left for text."""
    try:
        if not has_tools:
            raise NotACall
        unit = yield from source.read_visible()
        if unit != "{":
            if (end := (yield from source.match(channels.ends))) is None:
                source.refuse()
            source.unread_marker(end)
            writer.begin_call(name)
            writer.write_arguments("{}")
            writer.end_call()
        else:
            yield from parse_arguments(source, writer, name)
        source.accept()
    except NotACall:
        if writer.in_call:
            writer.end_call()
        writer.write_text(source.reject())


def _copy_text(source: TurnSource, channels: Channels, writer: EventWriter) -> Parse[None]:
    """Text or reasoning up to the end of the message, or to a header without one before it, which is not read."""
    ends = (*channels.ends, channels.start, channels.channel)
    run = run_without(ends)
    write = writer.write_reasoning if writer.in_reasoning else writer.write_text
    while True:
        write(source.reject())
        yield from source.read(run)
        if (marker := (yield from source.match(ends))) is not None:
            break
    writer.end_message()
    if marker in channels.ends:
        source.accept()
    else:
        source.unread_marker(marker)
