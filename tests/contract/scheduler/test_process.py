"""The scheduler as a process: election, health, shutdown."""

import signal
from collections.abc import Iterator

import grpc
import pytest

from checksum_service import ChecksumService, serve
from redis_server import RedisServer, running_server
from scheduler_harness import Worker, expected
from scheduler_process import NOT_SERVING, SERVICE, SERVING, scheduler_process


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis for the test."""
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def test_sigterm_hands_over_to_the_standby(redis_url: str, worker: Worker) -> None:
    port = worker.port
    async with (
        scheduler_process(redis_url, port) as first,
        scheduler_process(redis_url, port, QUIRE_STANDBY="1") as second,
    ):
        await first.until(SERVICE, SERVING)
        await second.until("liveness", SERVING)
        await second.until(SERVICE, NOT_SERVING)
        async with first.session() as session:
            await session.ready()
            submit = await session.submit(max_tokens=200)
            await session.until_tokens(submit.key, 20)
            first.process.terminate()
            assert await session.end() is grpc.StatusCode.UNAVAILABLE
            held = session.tokens(submit.key)
        assert await first.ended() == 0
        await second.until(SERVICE, SERVING)
        async with second.session() as session:
            answer = await session.attach(submit.key)
            assert list(answer.attached.sequences[0].token_ids)[: len(held)] == held
            assert await session.until_tokens(submit.key, 200) == expected(200)
        second.process.terminate()
        assert await second.ended() == 0


async def test_a_leader_that_was_stopped_and_replaced_ends_when_it_wakes_up(redis_url: str, worker: Worker) -> None:
    port = worker.port
    async with (
        scheduler_process(redis_url, port) as first,
        scheduler_process(redis_url, port, QUIRE_STANDBY="1") as second,
    ):
        await first.until(SERVICE, SERVING)
        first.process.send_signal(signal.SIGSTOP)
        await second.until(SERVICE, SERVING)
        first.process.send_signal(signal.SIGCONT)
        assert await first.ended() == 0
        async with second.session() as session:
            await session.ready()
            submit = await session.submit()
            assert await session.until_tokens(submit.key, 8) == expected(8)


async def test_health_reports_whether_requests_are_recorded(
    redis_url: str, worker: Worker, redis_server: RedisServer
) -> None:
    port = worker.port
    async with scheduler_process(redis_url, port) as running:
        await running.until("store", SERVING)
        redis_server.kill()
        await running.until("store", NOT_SERVING)
        await running.until(SERVICE, SERVING)
        redis_server.start()
        await running.until("store", SERVING)


async def test_health_reports_a_worker_that_is_set_apart_and_the_service_goes_on(
    redis_url: str, worker: Worker
) -> None:
    service = ChecksumService(epoch=2**64 - 1)
    server, port = await serve(service)
    async with scheduler_process(redis_url, worker.port, QUIRE_WORKERS_AT=f"127.0.0.1:{worker.port}") as alone:
        await alone.until("workers", SERVING)
        assert await alone.health() == {"status": "SERVING", "workers_set_apart": [], "resigned": None}
        addresses = f"127.0.0.1:{port},127.0.0.1:{worker.port}"
        alone.process.send_signal(signal.SIGTERM)
        assert await alone.ended() == 0
    async with scheduler_process(redis_url, port, QUIRE_WORKERS_AT=addresses) as running:
        await running.until(SERVICE, SERVING)
        await running.until("workers", NOT_SERVING)
        (apart,) = (await running.health())["workers_set_apart"]
        assert apart["worker"] == f"127.0.0.1:{port}"
        assert str(2**64 - 1) in apart["why"]
        async with running.session() as session:
            await session.ready()
            submit = await session.submit()
            assert await session.until_tokens(submit.key, 8) == expected(8)
    await server.stop(0)


async def test_without_a_store_nobody_leads(worker: Worker) -> None:
    port = worker.port
    async with scheduler_process("redis://127.0.0.1:1/0", port) as running:
        await running.until(SERVICE, NOT_SERVING)
        async with running.session() as session:
            assert await session.end() is grpc.StatusCode.UNAVAILABLE
        running.process.terminate()
        assert await running.ended() == 0
