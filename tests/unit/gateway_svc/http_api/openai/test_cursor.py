"""Event ids, from which a stream is resumed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.http_api.openai.answers import ResponseBuilder
from gateway_svc.http_api.openai.choice_formats import ChatFormat
from gateway_svc.http_api.openai.cursor import Cursor
from gateway_svc.output import Chunk, Finish, FinishReason, Usage
from gateway_svc.resume_position import EndDelivery, ResumePosition
from gateway_svc.sequence_output import SequenceOutput
from gateway_values import id_of, make_rendering, vocabulary_of
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import length_end
from svc_common.errors import QuireError, Reason
from tiny_model import EOS, tiny_tokenizer

TINY = tiny_tokenizer()
VOCABULARY = vocabulary_of(TINY)
FRAGMENTS = [*TINY.encode("aß你😀").ids, id_of(TINY, "hello"), id_of(TINY, "łå"), EOS]
LENGTH = Finish(FinishReason.LENGTH)

sequences = st.lists(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=6), min_size=2, max_size=2)


def streamed(outputs: list[list[int]], order: list[int], cursor: Cursor, stop: tuple[str, ...]) -> list[bytes]:
    """The events of a stream of two choices, one token per event, with the choices in this order, from a cursor on."""
    rendering = make_rendering(VOCABULARY, n=2, stop=stop)
    (resume_positions,) = cursor.resume_positions(2)
    answer = ResponseBuilder(ChatFormat(), [rendering], VOCABULARY, 0, cursor)
    choices = [SequenceOutput(index, VOCABULARY, rendering, resume_positions[index]) for index in range(2)]
    places = [0, 0]
    events: list[bytes] = []
    for index in [*order, *([0] * 6), *([1] * 6)]:
        place, token_ids = places[index], outputs[index]
        if place == len(token_ids) or choices[index].finish is not None:
            continue
        places[index] += 1
        end = length_end() if places[index] == len(token_ids) else None
        choices[index].extend(scheduler_v1.Tokens(offset=place, token_ids=[token_ids[place]], end=end))
        data = b"".join(answer.event(0, chunk) for chunk in choices[index].pop_pending())
        events += [event + b"\n\n" for event in data.split(b"\n\n") if event]
    last = answer.last_events(Usage(1, 2, 3))
    return events + [event + b"\n\n" for event in last.split(b"\n\n") if event]


def deltas(events: list[bytes]) -> list[tuple[int, Any]]:
    """The content of events, one item per character of text."""
    received: list[tuple[int, Any]] = []
    for event in events:
        data = event.split(b"data: ")[1]
        choices = [] if b"[DONE]" in data else json.loads(data)["choices"]
        for choice in choices:
            received += [(choice["index"], role) for role in [choice["delta"].get("role")] if role]
            received += [(choice["index"], char) for char in choice["delta"]["content"]]
            received += [(choice["index"], reason) for reason in [choice["finish_reason"]] if reason]
        if not choices:
            received.append((2, data))
    return sorted(received, key=lambda one: one[0])


@given(
    outputs=sequences,
    order=st.lists(st.integers(0, 1), max_size=12),
    stop=st.lists(st.text("aß你😀helo", min_size=1, max_size=3), max_size=2, unique=True).map(tuple),
)
def test_a_stream_resumes_after_any_event(outputs: list[list[int]], order: list[int], stop: tuple[str, ...]) -> None:
    whole = streamed(outputs, order, Cursor(2), stop)
    for place, event in enumerate(whole):
        cursor = Cursor.parse(event.split(b"\n")[0].removeprefix(b"id: ").decode(), 2)
        rest = streamed(outputs, order[::-1], cursor, stop)
        given = deltas(whole[: place + 1]) + deltas(rest)
        assert sorted(given, key=lambda one: one[0]) == deltas(whole)


def test_an_id_holds_the_position_of_each_choice() -> None:
    cursor = Cursor(3)
    assert not cursor.has_begun(1)
    assert cursor.advance(1, Chunk(1, 2, "a", [5, 6])) == b"id: 0-4-0\n"
    assert cursor.advance(0, Chunk(0, 0, "", [5], finish=LENGTH)) == b"id: 1e-4-0\n"
    assert (cursor.has_begun(0), cursor.has_begun(1), cursor.has_begun(2)) == (True, True, False)
    assert cursor.advance_past_usage() == b"id: 1e-4-0-usage\n"
    assert cursor.advance_to_end() == b"id: 1e-4-0-done\n"


def test_the_role_of_a_choice_is_sent_once() -> None:
    cursor = Cursor(2)
    assert cursor.open(1) == b"id: 0-0r\n"
    resumed = Cursor.parse("0-0r", 2)
    assert [resumed.has_begun(choice) for choice in range(2)] == [False, True]
    (positions,) = resumed.resume_positions(2)
    assert positions[0] == positions[1]


def test_an_id_leads_back_to_its_place() -> None:
    cursor = Cursor.parse("1e-4-0-0", 4)
    first, second = cursor.resume_positions(2)
    where = "last-event-id"
    assert first == {0: ResumePosition(1, EndDelivery.GIVEN, where), 1: ResumePosition(4, EndDelivery.MISSING, where)}
    assert second == {
        0: ResumePosition(0, EndDelivery.MISSING, where),
        1: ResumePosition(0, EndDelivery.MISSING, where),
    }
    assert not cursor.is_past_usage
    assert Cursor.parse("1e-4e-usage", 2).is_past_usage
    assert Cursor.parse("1e-done", 1).is_done


@pytest.mark.parametrize(
    "text", ["", "1", "1-2-3", "1--2", "a-b", "1e-2ee", "1r-2", "-1-2", "1-2-", "1-2-end", " 1-2", "１-2"]
)
def test_what_no_event_has_for_an_id_is_refused(text: str) -> None:
    with pytest.raises(QuireError) as error:
        Cursor.parse(text, 2)
    assert (error.value.reason, error.value.field) == (Reason.INVALID_FIELD, "last-event-id")
