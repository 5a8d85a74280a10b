"""The store is unreachable or does not respond."""

import asyncio
from collections.abc import Iterator

import pytest

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from redis_server import RedisServer, running_server
from scheduler_harness import TIMEOUT, Deployment, SessionClient, Worker, expected, scheduler, until_recorded
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis for the test, because it is killed."""
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def until_degraded(session: SessionClient, degraded: bool) -> None:
    async with asyncio.timeout(TIMEOUT):
        while session.status is None or session.status.is_store_degraded is not degraded:
            await session.read()


async def test_streams_go_on_without_the_store_and_are_recorded_when_it_is_back(
    running: Deployment, redis_server: RedisServer, store: RedisStore
) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=200)
        await session.until_tokens(submit.key, 5)
        redis_server.kill()
        late = await session.submit(max_tokens=20)
        answer = await session.answer(late.command_id)
        assert not answer.accepted.is_durable
        assert await session.until_tokens(submit.key, 200) == expected(200)
        assert await session.until_tokens(late.key, 20) == expected(20)
        await until_degraded(session, True)
        redis_server.start()
        await until_degraded(session, False)
        for key, count in ((submit.key, 200), (late.key, 20)):
            log = await until_recorded(store, key, State.FINISHED)
            assert log.sequences[0].token_ids == expected(count)


async def test_a_request_that_ended_meanwhile_is_given_again_from_memory(
    running: Deployment, redis_server: RedisServer
) -> None:
    async with running.session() as session:
        await session.ready()
        redis_server.kill()
        submit = await session.submit()
        await session.until(submit.key, "tokens")
        answer = await session.attach(submit.key)
        assert list(answer.attached.sequences[0].token_ids) == expected(8)
        answer = await session.attach("another")
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        resumption = await session.submit(is_resumption=True)
        answer = await session.answer(resumption.command_id)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE


async def test_a_deletion_that_fails_changes_nothing(
    running: Deployment, redis_server: RedisServer, worker: Worker
) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(detachable=True, max_tokens=200)
        await session.until_tokens(submit.key, 5)
        worker.gate.clear()
        redis_server.kill()
        answer = await session.delete(submit.key)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        worker.gate.set()
        assert await session.until_tokens(submit.key, 200) == expected(200)


async def test_requests_are_refused_where_the_store_is_needed(
    redis_url: str, worker: Worker, redis_server: RedisServer
) -> None:
    port = worker.port
    async with scheduler(redis_url, [port], without_store="refuse") as running, running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=100)
        await session.until_tokens(submit.key, 1)
        redis_server.kill()
        refused = await session.submit()
        answer = await session.answer(refused.command_id)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_STORE_DEGRADED
        assert await session.until_tokens(submit.key, 100) == expected(100)
        await until_degraded(session, True)  # else the next line may read a report from before
        redis_server.start()
        await until_degraded(session, False)
        taken = await session.submit()
        assert (await session.answer(taken.command_id)).accepted.is_durable


async def test_a_store_that_stands_still_holds_up_no_stream(
    running: Deployment, redis_server: RedisServer, worker: Worker
) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=200)
        await session.until_tokens(submit.key, 1)
        redis_server.pause()
        try:
            assert await session.until_tokens(submit.key, 200) == expected(200)
        finally:
            redis_server.resume()


async def test_a_refused_request_that_the_store_records_late_ends_there(
    redis_url: str, worker: Worker, redis_server: RedisServer
) -> None:
    async with scheduler(redis_url, [worker.port], without_store="refuse") as running, running.session() as session:
        await session.ready()
        redis_server.pause()
        try:
            refused = await session.submit(detachable=True)
            answer = await session.answer(refused.command_id)
            await until_degraded(session, True)  # else the next one may read a report from before
        finally:
            redis_server.resume()
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_STORE_DEGRADED
        await until_degraded(session, False)
        other = await session.submit(key=refused.key, detachable=True)
        assert (await session.answer(other.command_id)).accepted.is_durable
        assert await session.until_tokens(other.key, 8) == expected(8)
        await until_recorded(running.store, other.key, State.FINISHED)
        assert await running.store.live() == []
