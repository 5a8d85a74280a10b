"""Outputs with what is new are made of what is new."""

from types import SimpleNamespace
from typing import Any

import pytest

import quire_offline.deltas
from gateway_svc.output import Chunk, Finish, FinishReason, ToolCallDelta, merge_chunks
from quire_offline import SamplingParams
from quire_offline.deltas import Deltas
from quire_offline.offline_request import OfflineRequest


@pytest.fixture
def request_of_two() -> OfflineRequest:
    """A request for two sequences that runs."""
    request = OfflineRequest.of_prompt("id", "hello", SamplingParams(n=2))
    rendering = SimpleNamespace(logprobs=None, prompt_logprobs=None, is_best_of=False, seed=1, stop_token_ids=())
    running: Any = SimpleNamespace(rendering=rendering, vocabulary=None, usage=SimpleNamespace(cached_tokens=0))
    request.running = running
    return request


def test_each_output_is_made_of_the_chunks_since_the_last_one(
    request_of_two: OfflineRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged: list[int] = []

    def counted(chunks: list[Chunk]) -> list[Chunk]:
        merged.append(len(chunks))
        return merge_chunks(chunks)

    monkeypatch.setattr(quire_offline.deltas, "merge_chunks", counted)
    deltas = Deltas(request_of_two)
    texts = []
    for offset in range(50):
        request_of_two.chunks += [Chunk(0, offset, "a", [offset]), Chunk(0, offset, "b", [offset])]
        (part,) = deltas.next(finished=False).outputs
        texts.append(part.text)
    assert texts == ["ab"] * 50
    assert merged == [2] * 50


def test_calls_of_tools_come_whole_at_the_end_of_their_sequence(request_of_two: OfflineRequest) -> None:
    deltas = Deltas(request_of_two)
    request_of_two.chunks.append(Chunk(1, 0, token_ids=[1], tool_calls=[ToolCallDelta(0, "{", "call", "now")]))
    (part,) = deltas.next(finished=False).outputs
    assert (part.token_ids, part.tool_calls, part.finished()) == ([1], [], False)
    last = Chunk(1, 1, token_ids=[2], tool_calls=[ToolCallDelta(0, "}")], finish=Finish(FinishReason.TOOL_CALLS))
    request_of_two.chunks.append(last)
    (part,) = deltas.next(finished=False).outputs
    assert [(call.name, call.arguments) for call in part.tool_calls] == [("now", "{}")]
    assert part.token_ids == [2]


def test_an_abort_ends_the_sequences_that_run(request_of_two: OfflineRequest) -> None:
    deltas = Deltas(request_of_two)
    request_of_two.chunks += [Chunk(1, 0, "a", [1], finish=Finish(FinishReason.STOP))]
    request_of_two.was_aborted = True
    parts = [part for finished in (False, True) for part in deltas.next(finished=finished).outputs]
    assert [(part.index, part.text, part.finish_reason) for part in parts] == [(1, "a", "stop"), (0, "", "abort")]
