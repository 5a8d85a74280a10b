"""The flood lasts as long as it is measured. The clients are scripted."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from quire_client import Chunk, QuireError
from tests.acceptance import flood
from tests.acceptance.flood import Traffic


class ScriptedClient:
    """Ends each request at once, with an error from the request of number `fails_at` on."""

    fails_at = 10**9
    num_sent = 0

    def __init__(self, address: str, api_key: str) -> None:
        pass

    async def models(self) -> list[Any]:
        return [SimpleNamespace(vocab_size=100)]

    async def aclose(self) -> None:
        pass

    async def stream(self, prompt: Sequence[int], **options: Any) -> AsyncIterator[Chunk]:
        ScriptedClient.num_sent += 1
        await asyncio.sleep(0)
        if ScriptedClient.num_sent >= ScriptedClient.fails_at:
            raise QuireError(grpc.StatusCode.INTERNAL, "INTERNAL", "it failed")
        for _ in ():
            yield _


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood, "AsyncClient", ScriptedClient)
    monkeypatch.setattr(ScriptedClient, "num_sent", 0)


async def test_jobs_that_end_are_replaced() -> None:
    async with Traffic("gateway", seed=1) as traffic, traffic.flood(3):
        while traffic.num_jobs_ended < 10:
            await asyncio.sleep(0)
    num_ended = traffic.num_jobs_ended
    await asyncio.sleep(0.01)
    assert traffic.num_jobs_ended == num_ended


async def test_a_job_that_fails_ends_the_measurement_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedClient, "fails_at", 5)
    with pytest.raises(ExceptionGroup) as raised:
        async with Traffic("gateway", seed=1) as traffic, traffic.flood(3):
            await asyncio.sleep(600)
    assert raised.group_contains(QuireError, match="it failed")
