"""Turns of all formats: their events do not depend on how the output is divided."""

import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.message_formats.description import MessageFormat, Tool
from gateway_svc.message_formats.events import (
    MessageEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
    ToolCallEnd,
    join_events,
)
from gateway_svc.message_formats.formats import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.message_formats.parser import MessageParser
from gateway_svc.message_formats.source import TurnSource
from turn_grammars import with_reasoning

OUTPUTS = Path(__file__).with_name("outputs")


@dataclass(frozen=True)
class Recorded:
    """An output and its events. `control_tokens` are the markers that are tokens of their own."""

    title: str
    format: MessageFormat
    tools: Sequence[Tool]
    reasoning_is_open: bool
    control_tokens: frozenset[str]
    output: str
    events: list[MessageEvent]

    def parser(self) -> MessageParser:
        return MessageParser(
            self.format,
            self.tools,
            control_tokens=self.control_tokens,
            reasoning_is_open=self.reasoning_is_open,
        )

    def pieces(self, output: str) -> list[str]:
        """Text and control tokens in turn."""
        if not self.control_tokens:
            return [output]
        return re.split(f"({'|'.join(map(re.escape, sorted(self.control_tokens)))})", output)

    def feed(self, parser: MessageParser, text: str) -> list[MessageEvent]:
        return parser.feed(text, is_control=text in self.control_tokens)

    def parse(self, pieces: Iterable[str]) -> list[MessageEvent]:
        """All events, without those of the end."""
        parser = self.parser()
        return join_events(event for piece in pieces for event in self.feed(parser, piece))

    def parse_all(self, pieces: Iterable[str]) -> list[MessageEvent]:
        parser = self.parser()
        events = [event for piece in pieces for event in self.feed(parser, piece)]
        return join_events([*events, *parser.end()])


def read_recorded() -> list[Recorded]:
    """Each output, with the markers as tokens and as text, except where it says that only one of them is meant."""
    recorded = []
    for path in sorted(OUTPUTS.glob("*.toml")):
        file = tomllib.loads(path.read_text())
        tools = [Tool(**tool) for tool in json.loads(file["tools"])]
        message_format = MessageFormat(TOOL_FORMATS[path.stem], REASONING_FORMATS[file.get("reasoning", "think")])
        for entry in file["outputs"]:
            for kind, control_tokens in (("tokens", message_format.markers), ("text", frozenset[str]())):
                if entry.get(kind, True):
                    recorded.append(
                        Recorded(
                            f"{path.stem}: {entry['name']}, markers are {kind}",
                            message_format,
                            tools,
                            entry.get("reasoning_is_open", False),
                            control_tokens,
                            entry["output"],
                            read_events(entry["events"]),
                        )
                    )
    return recorded


def read_events(entries: Iterable[dict[str, Any]]) -> list[MessageEvent]:
    events: list[MessageEvent] = []
    num_calls = 0
    for entry in entries:
        match entry:
            case {"text": text}:
                events.append(TextDelta(text))
            case {"reasoning": text}:
                events.append(ReasoningDelta(text))
            case {"call": name, "arguments": arguments}:
                fragment = ToolArgumentsDelta(num_calls, arguments)
                end = ToolCallEnd(num_calls, entry.get("is_cut", False))
                events += (ToolCallBegin(num_calls, name), fragment, end)
                num_calls += 1
    return events


RECORDED = read_recorded()
each = pytest.mark.parametrize("recorded", RECORDED, ids=[one.title for one in RECORDED])


def test_every_format_has_recorded_outputs() -> None:
    assert {path.stem for path in OUTPUTS.glob("*.toml")} == TOOL_FORMATS.keys()


@each
def test_a_turn_has_its_events(recorded: Recorded) -> None:
    assert recorded.parse_all(recorded.pieces(recorded.output)) == recorded.events


@each
def test_events_of_single_characters_are_those_of_the_whole(recorded: Recorded) -> None:
    pieces = recorded.pieces(recorded.output)
    characters = [part for piece in pieces for part in ([piece] if piece in recorded.control_tokens else piece)]
    assert recorded.parse_all(characters) == recorded.events


@each
def test_events_of_a_beginning_are_a_beginning_of_the_events(recorded: Recorded) -> None:
    pieces = recorded.pieces(recorded.output)
    for which, piece in enumerate(pieces):
        for end in range(1, len(piece)):
            if piece not in recorded.control_tokens:
                assert_begins_with(recorded.events, recorded.parse([*pieces[:which], piece[:end]]))
        assert_begins_with(recorded.events, recorded.parse(pieces[: which + 1]))


def assert_begins_with(events: list[MessageEvent], beginning: list[MessageEvent]) -> None:
    if not beginning:
        return
    last, same_place = beginning[-1], events[len(beginning) - 1]
    assert beginning[:-1] == events[: len(beginning) - 1]
    match last, same_place:
        case (TextDelta(part), TextDelta(whole)) | (ReasoningDelta(part), ReasoningDelta(whole)):
            assert whole.startswith(part)
        case ToolArgumentsDelta(index, part), ToolArgumentsDelta(other_index, whole):
            assert index == other_index
            assert whole.startswith(part)
        case _:
            assert last == same_place


# What a model might write: parts of recorded outputs in any order, and what begins or ends them.
PARTS = sorted(
    {part for one in RECORDED for part in re.split(r'(<[^<>\s]*>|\[[A-Z_/]+\]|\s+|["{}\[\]:,;])', one.output) if part}
)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_division_of_any_output_has_the_same_events(name: str, data: st.DataObject) -> None:
    recorded = data.draw(st.sampled_from([one for one in RECORDED if one.format.tools is TOOL_FORMATS[name]]))
    output = recorded.output
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(output)))
        output = output[:at] + data.draw(st.sampled_from(PARTS)) + output[data.draw(st.integers(at, len(output))) :]
    whole = recorded.pieces(output)
    divided = []
    for piece in whole:
        cuts = [] if piece in recorded.control_tokens else data.draw(st.sets(st.integers(0, len(piece)), max_size=6))
        places = [0, *sorted(cuts), len(piece)]
        divided += [piece[start:end] for start, end in pairwise(places)]
    events = recorded.parse_all(whole)
    assert recorded.parse_all(divided) == events
    assert_well_formed(events)


def assert_well_formed(events: list[MessageEvent]) -> None:
    """Calls count from 0, and each has arguments that begin with a brace, and an end."""
    calls = [event for event in events if not isinstance(event, (TextDelta, ReasoningDelta))]
    for index in range(len(calls) // 3):
        begin, arguments, end = calls[3 * index : 3 * index + 3]
        assert isinstance(begin, ToolCallBegin)
        assert begin.name
        assert isinstance(arguments, ToolArgumentsDelta)
        assert arguments.fragment.startswith("{")
        assert (begin.name + arguments.fragment).encode()
        assert {begin.index, arguments.index, end.index} == {index}
        assert isinstance(end, ToolCallEnd)
    assert len(calls) % 3 == 0


def parse(text: str, *, tools: Sequence[Tool] = (Tool("f"),), **options: Any) -> list[MessageEvent]:
    message_format = MessageFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
    parser = MessageParser(message_format, tools, **options)
    return join_events([*parser.feed(text), *parser.end()])


def test_without_tools_calls_are_text_and_reasoning_is_not() -> None:
    text = '<think>x</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(text, tools=()) == [ReasoningDelta("x"), TextDelta(text.removeprefix("<think>x</think>"))]


def test_text_that_looks_like_a_token_is_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(text, control_tokens={"<tool_call>", "</tool_call>"}) == [TextDelta(text)]


def test_arguments_are_given_out_as_they_come() -> None:
    parser = MessageParser(MessageFormat(TOOL_FORMATS["hermes"]), [Tool("f")])
    parser.feed('<tool_call>{"name": "f", "arguments": ')
    assert parser.feed("{") == [ToolCallBegin(0, "f"), ToolArgumentsDelta(0, "{")]
    assert parser.feed('"a": "b') == [ToolArgumentsDelta(0, '"a": "b')]
    assert parser.feed('c"}') == [ToolArgumentsDelta(0, 'c"}'), ToolCallEnd(0)]
    assert parser.feed("}</tool_call>") == []


def test_strings_of_tags_are_given_out_as_they_come() -> None:
    tools = [Tool("f", {"type": "object", "properties": {"a": {"type": "string"}}})]
    parser = MessageParser(MessageFormat(TOOL_FORMATS["qwen3_coder"]), tools)
    assert parser.feed("<tool_call><function=f>") == [ToolCallBegin(0, "f"), ToolArgumentsDelta(0, "{")]
    assert parser.feed("<parameter=a>x") == [ToolArgumentsDelta(0, '"a": "x')]
    assert parser.feed('"y') == [ToolArgumentsDelta(0, '\\"y')]
    assert parser.feed("</parameter>") == [ToolArgumentsDelta(0, '"')]


def test_hidden_tokens_have_no_text() -> None:
    tokens = {"<|tool_call|>", "<|end|>"}
    granite = MessageFormat(TOOL_FORMATS["granite"])
    parser = MessageParser(granite, [Tool("f")], control_tokens=tokens, hidden_tokens=tokens)
    events = [*parser.feed("a"), *parser.feed("<|end|>", is_control=True)]
    events += [*parser.feed("<|tool_call|>", is_control=True), *parser.feed("no call"), *parser.end()]
    assert join_events(events) == [TextDelta("ano call")]


def test_shown_tokens_are_text() -> None:
    parser = MessageParser(MessageFormat(), [Tool("f")], control_tokens={"<b>"})
    assert parser.feed("<b>", is_control=True) == [TextDelta("<b>")]


def test_headers_are_no_text_where_neither_calls_nor_reasoning_are_looked_for() -> None:
    parser = MessageParser(MessageFormat(TOOL_FORMATS["harmony"]), [])
    call = "<|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}"
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert join_events([*parser.feed(text + call), *parser.end()]) == [TextDelta(f"Hm.\nYes.\n{call}")]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one element with each read of a turn's source."""
    reads: list[None] = []
    read = TurnSource.read

    def count(self: TurnSource, run: re.Pattern[str] | None = None) -> Any:
        reads.append(None)
        return read(self, run)

    monkeypatch.setattr(TurnSource, "read", count)
    return reads


@pytest.mark.parametrize(
    "part",
    [
        "<tool_cal",
        "<",
        " ",
        "<tool_call>",
        '<tool_call>{"name": "',
        '<tool_call>{"name": "f", "arguments": {"a": [',
        "a",
    ],
)
def test_time_is_linear_in_the_output(part: str, reads: list[None]) -> None:
    output = part * 500
    parser = MessageParser(MessageFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]), [Tool("f")])
    for character in output:
        parser.feed(character)
    assert len(reads) <= 12 * len(output)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_time_is_linear_in_each_format(name: str, reads: list[None]) -> None:
    message_format = with_reasoning(name)
    for marker in message_format.markers:
        for part in (marker, marker[:-1], marker[0], f'{marker}{{"', f"{marker}\n"):
            reads.clear()
            parser = MessageParser(message_format, [Tool("f")])
            for character in part * 50:
                parser.feed(character)
            assert len(reads) <= 12 * 50 * len(part), part
