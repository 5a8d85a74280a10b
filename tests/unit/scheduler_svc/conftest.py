"""A store on a real Redis, and a journal that writes to it."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from journals import JournalCallbacks, journal_of, store_at
from redis_server import RedisServer, running_server
from scheduler_svc.journal import Journal
from scheduler_svc.store.redis import RedisStore


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The embedded one."""
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def keys(server: RedisServer) -> Iterator["redis.Redis"]:
    """The bare server, empty when the test begins."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def lasting(server: RedisServer, keys: "redis.Redis") -> RedisServer:
    """A server that the tests share, empty when each begins."""
    return server


@pytest.fixture
def url(lasting: RedisServer) -> str:
    """Of the server, which is empty when the test begins."""
    return lasting.url


@pytest.fixture
async def store(lasting: RedisServer) -> AsyncIterator[RedisStore]:
    """A store on an empty server."""
    async with store_at(lasting) as store:
        yield store


@pytest.fixture
def callbacks() -> JournalCallbacks:
    """Records the callbacks of the journal."""
    return JournalCallbacks()


@pytest.fixture
def journal(store: RedisStore, callbacks: JournalCallbacks) -> Journal:
    """It writes once it is run or flushed."""
    return journal_of(store, callbacks)
