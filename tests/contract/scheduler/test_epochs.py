"""Workers and records with epochs that no leader can have begun."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis

from checksum_service import ChecksumService, serve
from llama_models import VARIANTS, save_model
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_harness import TIMEOUT, Deployment, Worker, expected, scheduler
from worker_service import serving, small_replica

DAY = 86400 * 10**6
BEYOND = {"last": 2**64 - 1, "inexact": 2**53, "ahead": time.time_ns() // 1000 + 2 * DAY}
each = pytest.mark.parametrize("epoch", BEYOND.values(), ids=BEYOND)


@asynccontextmanager
async def worker_of(epoch: int) -> AsyncIterator[tuple[ChecksumService, int]]:
    """A worker that reports an epoch, and its port."""
    service = ChecksumService(epoch=epoch)
    server, port = await serve(service)
    try:
        yield service, port
    finally:
        await server.stop(0)


async def runs(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit()
        assert await session.until_tokens(submit.key, 8) == expected(8)


async def until_set_apart(running: Deployment, *ports: int) -> None:
    async with asyncio.timeout(TIMEOUT):
        while list(running.engine.set_apart) != [f"127.0.0.1:{port}" for port in ports]:
            await asyncio.sleep(0.01)


@each
async def test_a_worker_with_an_epoch_outside_the_window_is_set_apart(
    epoch: int, redis_url: str, worker: Worker
) -> None:
    async with worker_of(epoch) as (service, port):
        async with scheduler(redis_url, [port, worker.port]) as first:
            await until_set_apart(first, port)
            await runs(first)
            assert service.openings == []
            assert first.engine.epoch < time.time_ns() // 1000 + 600 * 10**6
            before = first.engine.epoch
        async with scheduler(redis_url, [port, worker.port]) as second:  # the term after that begins as usual
            await runs(second)
            assert before < second.engine.epoch < time.time_ns() // 1000 + 600 * 10**6
            await until_set_apart(second, port)


async def test_a_worker_that_was_restarted_is_used_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("scheduler_svc.worker_link._REDIAL_SET_APART", 0.05)
    async with worker_of(2**64 - 1) as (service, port), scheduler(redis_url, [port]) as running:
        await until_set_apart(running, port)
        (record,) = [one for one in caplog.records if one.getMessage() == "no worker"]
        assert record.levelname == "WARNING"
        assert str(2**64 - 1) in vars(record)["why"]
        service.about.epoch = 0
        await runs(running)
        await until_set_apart(running)


class Restartable(ChecksumService):
    """It has forgotten its epoch after as many orders to restart."""

    def __init__(self, num_orders: int) -> None:
        super().__init__(epoch=2**64 - 1)
        self.restarts = []
        self._num_orders = num_orders

    async def Restart(self, request: worker_v1.RestartRequest, context: Any) -> worker_v1.RestartResponse:
        response = await super().Restart(request, context)
        if self.restarts is not None and len(self.restarts) == self._num_orders:
            self.about.epoch = 0
        return response


async def test_the_leader_orders_a_worker_that_is_set_apart_to_restart(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("scheduler_svc.worker_link._REDIAL_SET_APART", 0.05)
    service = Restartable(num_orders=1)
    server, port = await serve(service)
    async with scheduler(redis_url, [port]) as running:
        await runs(running)
        assert service.restarts == [worker_v1.RestartRequest(epoch=running.engine.epoch, worker_epoch=2**64 - 1)]
        assert running.engine.set_apart == {}
    assert [record.levelname for record in caplog.records if "it restarts" in vars(record).get("why", "")] == [
        "WARNING"
    ]
    await server.stop(0)


async def test_it_orders_that_once_per_term(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.worker_link._REDIAL_SET_APART", 0.02)
    service = Restartable(num_orders=2)
    server, port = await serve(service)
    async with scheduler(redis_url, [port]) as first:
        await until_set_apart(first, port)
        async with asyncio.timeout(TIMEOUT):
            while "in this term before" not in first.engine.set_apart.get(f"127.0.0.1:{port}", ""):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # several dials
        assert service.restarts is not None
        assert len(service.restarts) == 1
    async with scheduler(redis_url, [port]) as second:
        await runs(second)
    assert [order.epoch for order in service.restarts] == [first.engine.epoch, second.engine.epoch]
    await server.stop(0)


async def test_a_worker_that_cannot_be_ordered_to_restart_says_so(redis_url: str) -> None:
    async with worker_of(2**64 - 1) as (_, port), scheduler(redis_url, [port]) as running:
        await until_set_apart(running, port)
        assert "it does not restart (Method not found!)" in running.engine.set_apart[f"127.0.0.1:{port}"]


async def test_workers_of_usual_epochs_are_never_ordered_to_restart(redis_url: str) -> None:
    service = ChecksumService(epoch=time.time_ns() // 1000 + DAY // 2)
    service.restarts = []
    server, port = await serve(service)
    async with scheduler(redis_url, [port]) as running:
        await runs(running)  # its term is above the worker's epoch
    assert service.restarts == []
    await server.stop(0)


async def test_a_real_worker_whose_clock_is_ahead_gets_the_order(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns() // 1000
    monkeypatch.setattr("worker_svc.service._clock", lambda: now + 10 * DAY)
    async with serving() as real:
        real.service.serve(small_replica(save_model(tmp_path, VARIANTS["llama"]())))
        stream = await real.open(epoch=now + 9 * DAY)
        await stream.call.done_writing()
        assert await stream.call.read() is grpc.aio.EOF
        async with scheduler(redis_url, [real.port]), asyncio.timeout(TIMEOUT):
            await real.service.restart_ordered.wait()


@each
async def test_a_stored_epoch_outside_the_window_is_replaced(epoch: int, redis_url: str, worker: Worker) -> None:
    with redis.Redis.from_url(redis_url) as keys:
        keys.hset("{quire}:epoch", "epoch", epoch)
    async with scheduler(redis_url, [worker.port]) as running:
        assert running.engine.epoch < time.time_ns() // 1000 + 600 * 10**6
        await runs(running)


class Forgiving(ChecksumService):
    """It reports an epoch outside the window, and accepts one within it, as workers do."""

    async def Step(
        self, requests: AsyncIterator[worker_v1.StepRequest], context: Any
    ) -> AsyncIterator[worker_v1.StepResponse]:
        self.about.epoch = 0
        async for response in super().Step(requests, context):
            yield response


async def test_a_worker_that_accepts_the_leader_nevertheless_is_used(redis_url: str) -> None:
    service = Forgiving(epoch=BEYOND["ahead"])
    server, port = await serve(service)
    async with scheduler(redis_url, [port]) as running:
        await runs(running)
        assert running.engine.set_apart == {}
        assert running.engine.epoch < time.time_ns() // 1000 + 600 * 10**6
    await server.stop(0)
