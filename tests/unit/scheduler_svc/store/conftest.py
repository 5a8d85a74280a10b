"""The stores that the conformance suite is run on."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from redis_server import RedisServer, running_server
from scheduler_svc.store.redis import RedisStore
from tools import tool

TTL = 500


@pytest.fixture(params=["embedded", "installed"], scope="package")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server of each kind that there is."""
    executable = tool("redis-server") if request.param == "installed" else None
    with running_server(tmp_path_factory.mktemp("redis"), executable) as running:
        yield running


@pytest.fixture
async def store(server: RedisServer, keys: "redis.Redis") -> AsyncIterator[RedisStore]:
    """A store on an empty server, which may take its time on a busy machine."""
    store = RedisStore(f"{server.url}?socket_timeout=30&socket_connect_timeout=30", TTL)
    yield store
    await store.close()
