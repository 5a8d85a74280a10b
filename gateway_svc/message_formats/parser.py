"""Parses the output of a sequence: an assistant's turn of reasoning, text and calls.

- Reasoning may stand first, before any text. Of calls and reasoning, only what the format describes is looked for.
- White space between markers and text is neither. All other output is either an event, or text as it was written.
- What begins like a call and is none, such as JSON with an error before the arguments, is text, with its markers.
- A call begins with its name and the first character of its arguments. If its text turns out not to be a call after
  that, the call ends with the arguments so far, and the rest is text.
- After a marker, a name that no tool has is a call too: clients answer the model that there is no such tool. Without a
  marker, only the name of a tool makes JSON a call.
"""

import re
from collections.abc import Collection, Sequence

from gateway_svc.message_formats.brace_calls import parse_brace_calls
from gateway_svc.message_formats.channel_messages import is_header_beginning, parse_messages
from gateway_svc.message_formats.description import (
    BraceCalls,
    JsonCalls,
    MessageFormat,
    NamedCalls,
    PythonCalls,
    ReasoningFormat,
    Tool,
)
from gateway_svc.message_formats.events import MessageEvent
from gateway_svc.message_formats.json_calls import parse_json_calls
from gateway_svc.message_formats.named_calls import parse_named_calls
from gateway_svc.message_formats.python_calls import parse_python_calls
from gateway_svc.message_formats.source import ControlMarker, NotACall, Parse, Run, TurnSource, run_without
from gateway_svc.message_formats.writer import EventWriter
from gateway_svc.message_formats.xml_calls import parse_xml_calls

_SPACE = re.compile(r"\s")


class MessageParser:
    """The parser of one sequence. It takes time linear in the output, and never fails.

    A parser cannot be copied. One that is fed the same output from its beginning has the same state.
    """

    def __init__(
        self,
        message_format: MessageFormat,
        tools: Sequence[Tool],
        *,
        control_tokens: Collection[str] = (),
        hidden_tokens: Collection[str] = (),
        reasoning_is_open: bool = False,
    ) -> None:
        """Without tools, calls are text.

        `control_tokens` are the literals of all added tokens of the tokenizer; `hidden_tokens` are those of them that
        contribute no text. `reasoning_is_open` says that the prompt ends within the reasoning.
        """
        has_calls = bool(tools) or message_format.channels is not None
        self._format = message_format if has_calls else MessageFormat(None, message_format.reasoning)
        self._tools = {tool.name: tool for tool in tools}
        self._control_markers = self._format.markers.intersection(control_tokens)
        self._hidden = frozenset(hidden_tokens)
        self._source = TurnSource(self._control_markers, self._hidden)
        self._writer = EventWriter(self._source)
        reasoning = self._format.reasoning
        self._ignored = reasoning.answer[:1] if reasoning is not None and reasoning.marks_each_answer else ()
        """The marker around the answer that may come next."""
        self._channels = self._format.channels
        self._turn = (
            self._parse_turn(reasoning_is_open)
            if self._channels is None
            else parse_messages(
                self._source,
                self._channels,
                self._writer,
                self._tools if self._format.tools is not None else {},
                has_reasoning=self._format.reasoning is not None,
                is_open=reasoning_is_open,
            )
        )
        self._run: Run | None = next(self._turn)

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, or ends it."""
        return self._writer.in_reasoning

    def feed(self, text: str, *, is_control: bool = False) -> list[MessageEvent]:
        """The events of more output: of text, or with `is_control` of one added token, whose literal is `text`."""
        if is_control and text in self._control_markers:
            self._run = self._turn.send(ControlMarker(text))
        elif not (is_control and text in self._hidden):
            self._feed_text(text)
        return self._writer.take()

    def end(self, last_token: str = "") -> list[MessageEvent]:
        """The last events, when no more output follows. What may have become a marker or a call is text.

        The end of a call that was cut is among them. Of a header without its end there is nothing. `last_token` is the
        literal of the token that ended the output, which was not fed: after the header of a call, it ends a call
        without arguments.
        """
        channels, in_header = self._channels, self._writer.in_header
        if channels is not None and in_header and self._source.last == channels.message and last_token in channels.ends:
            self._turn.send(ControlMarker(last_token))
        rest = self._source.reject()
        if channels is not None and self._writer.in_header and is_header_beginning(rest, channels):
            rest = ""
        if self._writer.in_reasoning:
            self._writer.write_reasoning(rest)
        elif not self._writer.in_call:
            self._writer.write_text(rest)
        self._writer.end()
        return self._writer.take()

    def _feed_text(self, text: str) -> None:
        at = 0
        while at < len(text):
            matched = None if self._run is None else self._run.match(text, at)
            end = at + 1 if matched is None else matched.end()
            self._run = self._turn.send(text[at:end])
            at = end

    def _parse_turn(self, reasoning_is_open: bool) -> Parse[None]:
        reasoning = self._format.reasoning
        is_beginning = True
        marker = reasoning.begin if reasoning is not None and reasoning_is_open else None
        while True:
            if marker is None:
                marker = yield from self._parse_text(is_beginning)
            if is_beginning and reasoning is not None and marker == reasoning.begin:
                marker = yield from self._parse_reasoning(reasoning)
            else:
                is_beginning = False
                yield from self._parse_calls(marker)
                marker = None

    def _parse_calls(self, marker: str) -> Parse[None]:
        """Calls after a marker, or after what begins them without one; that is empty where nothing does."""
        tools = self._format.tools
        assert tools is not None, "only markers of calls lead here"
        try:
            match tools.calls:
                case JsonCalls() as calls:
                    known_names = None if marker else self._tools
                    yield from parse_json_calls(self._source, calls, self._writer, known_names)
                case NamedCalls() as calls:
                    yield from parse_named_calls(self._source, calls, self._writer)
                case PythonCalls() as calls:
                    known_names = None if marker else self._tools
                    yield from parse_python_calls(self._source, calls, self._writer, known_names)
                case BraceCalls() as calls:
                    yield from parse_brace_calls(self._source, calls, self._writer)
                case calls:
                    is_marked = marker == calls.begin
                    yield from parse_xml_calls(self._source, calls, self._writer, self._tools, is_marked=is_marked)
        except NotACall:
            if self._writer.in_call:
                self._writer.end_call()
            self._writer.write_text(self._source.reject())

    def _parse_reasoning(self, reasoning: ReasoningFormat) -> Parse[str | None]:
        """Reasoning with its end. Returns the marker of calls that ended it, if one did: some models leave the other
        out. Only one that is a token does, since reasoning may be about markers."""
        self._writer.in_reasoning = True
        self._writer.add_marker()
        self._source.accept()
        if reasoning.heading:
            yield from self._source.read()
            if (yield from self._source.match((reasoning.heading,))) is None:
                self._source.unread()
            self._source.accept()
        calls = () if self._format.tools is None else self._format.tools.calls.begins
        ends = (reasoning.end, *self._control_markers.intersection(calls))
        run = run_without(ends)
        while True:
            yield from self._source.read(run)
            if (marker := (yield from self._source.match(ends))) is not None:
                break
            self._writer.write_reasoning(self._source.reject())
        self._writer.in_reasoning = False
        self._writer.add_marker()
        if marker != reasoning.end:
            return marker
        self._source.accept()
        self._ignored = reasoning.answer[:1]
        return None

    def _parse_text(self, is_beginning: bool) -> Parse[str]:
        """Text up to a marker of calls or reasoning, which is returned; or what begins calls without one."""
        calls = None if self._format.tools is None else self._format.tools.calls
        begins = () if calls is None else calls.begins
        line_begin = () if calls is None or calls.line_begin is None else (calls.line_begin,)
        reasoning = self._format.reasoning
        while is_beginning:
            unit = yield from self._source.read()
            ends = (*begins, *line_begin, *(() if reasoning is None else (reasoning.begin,)))
            if (marker := (yield from self._source.match((*ends, *self._ignored)))) is not None:
                if marker not in self._ignored or reasoning is None:
                    return marker
                self._ignore(reasoning.answer[1:])
                break
            if calls is not None and calls.is_bare and unit in ("{", "["):
                self._source.unread()
                return ""
            if not _SPACE.match(unit):
                is_beginning = False
                self._ignored = ()
            self._writer.write_text(self._source.reject())
        begins = (*begins, *(f"\n{each}" for each in line_begin))
        run = run_without((*begins, *self._ignored))
        while True:
            yield from self._source.read(run)
            if (marker := (yield from self._source.match((*begins, *self._ignored)))) is not None:
                if marker not in self._ignored:
                    return marker
                self._ignore(())
                continue
            self._writer.write_text(self._source.reject())

    def _ignore(self, next_ignored: tuple[str, ...]) -> None:
        """Leaves out a marker around the answer; `next_ignored` is the other one, if it comes after this one."""
        self._writer.add_marker()
        self._source.accept()
        self._ignored = next_ignored
