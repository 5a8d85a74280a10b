"""Calls with many prompts are submitted in parts: other calls go on in between."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from embedding_calls import LIMITS, vector_of
from gateway_harness import Harness, running_gateway
from gateway_svc.session import SchedulerSession
from scripted_scheduler import answer_with, embed_with
from tiny_model import EOS


async def submitted_at_once(
    quire: Harness, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    """The lengths of the prompts that a call submits in each turn of the event loop in which it submits any."""
    turns: list[list[int]] = []
    is_turn_over = True
    subscribe = SchedulerSession.subscribe

    def end_turn() -> None:
        nonlocal is_turn_over
        is_turn_over = True

    def recorded(session: SchedulerSession, key: str, submit: Any, *arguments: Any) -> Any:
        nonlocal is_turn_over
        if is_turn_over:
            turns.append([])
            is_turn_over = False
            asyncio.get_running_loop().call_soon(end_turn)
        turns[-1].append(len(submit.prompt_token_ids))
        return subscribe(session, key, submit, *arguments)

    monkeypatch.setattr(SchedulerSession, "subscribe", recorded)
    response = await quire.http.post(path, json=body)
    assert response.status_code == 200
    return turns


@pytest.mark.parametrize(("num_prompts", "length"), [(1, 1000), (20, 10), (1024, 10), (40, 1000)])
async def test_completions(
    num_prompts: int, length: int, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_gateway(model_directory, context_length=2048) as quire:
        quire.scheduler.script = answer_with([100], stop_token_id=EOS)
        body = {"prompt": [[100] * length] * num_prompts, "max_tokens": 8}
        turns = await submitted_at_once(quire, "/v1/completions", body, monkeypatch)
        check(turns, num_prompts, length)
        assert len(quire.scheduler.all("submit")) == num_prompts


@pytest.mark.parametrize("num_prompts", [1, 500])
async def test_embeddings(num_prompts: int, encoder_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_gateway(encoder_directory, **LIMITS) as quire:
        quire.scheduler.script = embed_with(vector_of)
        turns = await submitted_at_once(quire, "/v1/embeddings", {"input": ["a"] * num_prompts}, monkeypatch)
        check(turns, num_prompts, 3)


def check(turns: list[list[int]], num_prompts: int, length: int) -> None:
    assert [one for turn in turns for one in turn] == [length] * num_prompts
    for turn in turns:
        assert len(turn) <= 129
        assert sum(turn[:-1]) <= 8192
    if num_prompts * (length + 64) <= 8192:
        assert len(turns) == 1
