"""Fixtures of the scheduler's contract tests: real gRPC on both sides and a real Redis, with a checksum as model."""

from collections.abc import AsyncIterator, Iterator

import pytest

from checksum_service import serve
from redis_server import RedisServer, running_server
from scheduler_harness import Deployment, Worker, scheduler
from scheduler_svc.store.redis import RedisStore


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis for the module."""
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of the Redis."""
    return redis_server.url


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RedisStore]:
    """The test's own client of the store."""
    store = RedisStore(redis_url, 600)
    yield store
    await store.close()


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    """A worker for the test."""
    service = Worker()
    server, service.port = await serve(service)
    yield service
    service.gate.set()
    await server.stop(0)


@pytest.fixture
async def running(redis_url: str, worker: Worker) -> AsyncIterator[Deployment]:
    """A scheduler that leads, with that worker."""
    async with scheduler(redis_url, [worker.port]) as deployment:
        yield deployment
