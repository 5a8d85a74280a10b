"""Texts that custom tools take: read from arguments while they are written."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.custom_inputs import CustomInputs
from gateway_svc.message_formats.events import (
    MessageEvent,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
    ToolCallEnd,
)


def read(fragments: list[str], *, is_cut: bool = False) -> list[str]:
    """The pieces of the text of one call."""
    inputs = CustomInputs(["run"])
    events: list[MessageEvent] = [ToolCallBegin(0, "run")]
    events += [ToolArgumentsDelta(0, fragment) for fragment in fragments]
    given_out = list(inputs.read([*events, ToolCallEnd(0, is_cut)]))
    assert (given_out[0], given_out[-1]) == (ToolCallBegin(0, "run"), ToolCallEnd(0, is_cut))
    return [event.fragment for event in given_out if isinstance(event, ToolArgumentsDelta)]


@given(st.text(st.characters(codec="utf-8")), st.booleans(), st.integers(1, 7), st.sampled_from(["", " ", "\n"]))
def test_a_text_is_the_same_however_it_is_escaped_and_divided(text: str, is_ascii: bool, size: int, space: str) -> None:
    written = f'{space}{{{space}"input":{space}{json.dumps(text, ensure_ascii=is_ascii)}{space}}}'
    assert "".join(read([written[at : at + size] for at in range(0, len(written), size)])) == text


def test_a_text_streams() -> None:
    assert read(['{"input": "a', "b\\", "n\\u00e", '9c"', "}"]) == ["a", "b", "\n", "éc"]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"input": "a\nb"}', "a\nb"),
        (r'{"input": "a\qb\uzz"}', r"a\qb\uzz"),
        (r'{"input": "a\ud83d"}', "a\N{REPLACEMENT CHARACTER}"),
        (r'{"input": "\udc00\ud83d\ud83d\ude00"}', "\N{REPLACEMENT CHARACTER}" * 2 + "😀"),
        ('{"input": "a", "other": "b"}', "a"),
        ('{"text": "a"}', '{"text": "a"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ("{}", "{}"),
        ('{" input": "a"}', '{" input": "a"}'),
        ('{"input" "a"}', '{"input" "a"}'),
        ('\u2003{\n"input"\t:\r "a"}', "a"),
    ],
)
def test_arguments_of_other_forms(written: str, text: str) -> None:
    for fragments in ([written], list(written)):
        assert "".join(read(fragments)) == text


@pytest.mark.parametrize(("written", "text"), [('{"inp', ""), ('{"input": "ab', "ab"), (r'{"input": "a\ud83d\u', "a")])
def test_what_was_cut_has_the_text_so_far(written: str, text: str) -> None:
    assert "".join(read(list(written), is_cut=True)) == text


class CountedText(str):
    """A text that counts how many of its characters are looked at or joined to others."""

    __slots__ = ()
    num_characters = 0

    def __iter__(self) -> Iterator[str]:
        for character in str(self):
            CountedText.num_characters += 1
            yield character

    def __radd__(self, before: str) -> str:
        CountedText.num_characters += len(before)
        return before + str(self)


@pytest.mark.parametrize("beginning", ["", "{", '{"input"', '{"input":', '{"other": "'])
def test_the_beginning_of_arguments_is_read_once(beginning: str) -> None:
    CountedText.num_characters = 0
    assert "".join(read([beginning, *[CountedText("    ")] * 1_000])) == beginning + " " * 4_000
    assert CountedText.num_characters <= 4_000


def test_other_events_stay() -> None:
    inputs = CustomInputs(["run"])
    events: list[MessageEvent] = [TextDelta("a"), ToolCallBegin(0, "f"), ToolArgumentsDelta(0, '{"input": "b"}')]
    assert [(event, inputs.is_reading) for event in inputs.read(events)] == [(event, False) for event in events]
    custom: list[MessageEvent] = [ToolCallEnd(0), ToolCallBegin(1, "run"), ToolArgumentsDelta(1, '{"input": "c"}')]
    assert list(inputs.read(custom)) == [ToolCallEnd(0), ToolCallBegin(1, "run"), ToolArgumentsDelta(1, "c")]
    assert inputs.is_reading
