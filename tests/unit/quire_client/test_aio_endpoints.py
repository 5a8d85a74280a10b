"""Probes of a silent gateway."""

import asyncio
from typing import Any

import pytest

from quire_client.aio_endpoints import AsyncEndpoint
from quire_client.connection import Connection


class Call:
    """A call that receives nothing."""

    def cancel(self) -> None:
        """Nothing waits for it."""


class Gateway:
    """Answers a probe when the test allows it."""

    def __init__(self) -> None:
        self.num_probes = 0
        self.num_open = 0
        self.allowed = asyncio.Semaphore(0)

    async def ListModels(self, request: Any, **options: Any) -> None:
        self.num_probes += 1
        self.num_open += 1
        try:
            await self.allowed.acquire()
        finally:
            self.num_open -= 1


async def run_all() -> None:
    """Lets every task that can run do so, and what it starts."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def endpoint(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An endpoint whose gateway is silent at any time."""
    monkeypatch.setattr("quire_client.aio_endpoints.KEEPALIVE_SECONDS", 0.0)
    made = AsyncEndpoint(0, Connection.resolve("127.0.0.1:1", None, None, None), ())
    made.__dict__["stub"] = gateway
    return made


async def test_calls_that_begin_during_a_probe_add_none(endpoint: Any, gateway: Gateway) -> None:
    with endpoint.watching(Call(), is_watched=True):
        for num_probes in range(1, 7):
            await run_all()
            assert (gateway.num_probes, gateway.num_open) == (num_probes, 1)
            with endpoint.watching(Call(), is_watched=True):
                await run_all()
            assert (gateway.num_probes, gateway.num_open) == (num_probes, 1)
            gateway.allowed.release()
    await endpoint.close()


async def test_nothing_runs_after_close(endpoint: Any, gateway: Gateway) -> None:
    with endpoint.watching(Call(), is_watched=True):
        await run_all()
        with endpoint.watching(Call(), is_watched=True):
            await run_all()
        await endpoint.close()
        await run_all()
        assert gateway.num_open == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

        gateway.allowed.release()
        await run_all()
        assert gateway.num_probes == 1


async def test_probes_end_with_the_calls_and_begin_with_the_next(endpoint: Any, gateway: Gateway) -> None:
    with endpoint.watching(Call(), is_watched=True):
        await run_all()
    gateway.allowed.release()
    await run_all()
    assert asyncio.all_tasks() == {asyncio.current_task()}

    with endpoint.watching(Call(), is_watched=True):
        await run_all()
        assert gateway.num_probes == 2
    await endpoint.close()
