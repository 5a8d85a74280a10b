"""Calls with many prompts are validated and submitted in parts: other calls go on in between."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from embedding_calls import LIMITS, vector_of
from gateway_harness import running_gateway
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field
from gateway_svc.session import SchedulerSession
from scripted_scheduler import answer_with, embed_with
from tiny_model import EOS


class Turns:
    """The lengths of the prompts on which each turn of the event loop worked, of those that worked on any."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []
        self._is_over = True

    def add(self, length: int) -> None:
        if self._is_over:
            self.lengths.append([])
            self._is_over = False
            asyncio.get_running_loop().call_soon(self._end)
        self.lengths[-1].append(length)

    def check(self, num_prompts: int, length: int) -> None:
        assert [one for turn in self.lengths for one in turn] == [length] * num_prompts
        for turn in self.lengths:
            assert len(turn) <= 129
            assert sum(turn[:-1]) <= 8192
        if num_prompts * (length + 64) <= 8192:
            assert len(self.lengths) == 1

    def _end(self) -> None:
        self._is_over = True


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> Turns:
    turns, subscribe = Turns(), SchedulerSession.subscribe

    def recorded(session: SchedulerSession, key: str, submit: Any, *arguments: Any) -> Any:
        turns.add(len(submit.prompt_token_ids))
        return subscribe(session, key, submit, *arguments)

    monkeypatch.setattr(SchedulerSession, "subscribe", recorded)
    return turns


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> Turns:
    turns, check = Turns(), FieldChecker.token_ids

    def recorded(checker: FieldChecker, which: Field, token_ids: Any, *arguments: Any) -> None:
        if which is Field.TOKEN_IDS:
            turns.add(len(token_ids))
        check(checker, which, token_ids, *arguments)

    monkeypatch.setattr(FieldChecker, "token_ids", recorded)
    return turns


@pytest.mark.parametrize(("num_prompts", "length"), [(1, 1000), (20, 10), (1024, 10), (40, 1000)])
async def test_completions(
    num_prompts: int, length: int, model_directory: Path, submitted: Turns, validated: Turns
) -> None:
    async with running_gateway(model_directory, context_length=2048) as quire:
        quire.scheduler.script = answer_with([100], stop_token_id=EOS)
        body = {"prompt": [[100] * length] * num_prompts, "max_tokens": 8}
        assert (await quire.http.post("/v1/completions", json=body)).status_code == 200
        assert len(quire.scheduler.all("submit")) == num_prompts
    submitted.check(num_prompts, length)
    validated.check(num_prompts, length)


@pytest.mark.parametrize("num_prompts", [1, 500])
async def test_embeddings(num_prompts: int, encoder_directory: Path, submitted: Turns) -> None:
    async with running_gateway(encoder_directory, **LIMITS) as quire:
        quire.scheduler.script = embed_with(vector_of)
        answer = await quire.http.post("/v1/embeddings", json={"input": ["a"] * num_prompts})
        assert answer.status_code == 200
    submitted.check(num_prompts, 3)
