"""The check of Redis' eviction policy, on a real Redis."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import redis
from prometheus_client import REGISTRY
from prometheus_client.samples import Sample

from redis_server import RedisServer
from scheduler_svc.store import eviction
from scheduler_svc.store.redis import RedisStore

METRIC = "quire_store_eviction_policy"


@pytest.fixture
def server_keys(keys: "redis.Redis") -> Iterator["redis.Redis"]:
    """The bare server. Its policy and users are reset."""
    yield keys
    keys.config_set("maxmemory-policy", "noeviction")
    keys.acl_deluser("limited")


@asynccontextmanager
async def watched(store: RedisStore) -> AsyncIterator[None]:
    watching = asyncio.create_task(eviction.watch_eviction(store))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def until_policy(policy: str) -> None:
    """Waits until the metric has this policy, and no other."""
    async with asyncio.timeout(60):
        while [(sample.labels["policy"], sample.value) for sample in samples()] != [(policy, 1)]:
            await asyncio.sleep(0.01)


def samples() -> list[Sample]:
    return [one for metric in REGISTRY.collect() if metric.name == METRIC for one in metric.samples]


def logged_by_scheduler(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without records of other loggers, such as asyncio's of what an earlier test left."""
    return [record for record in caplog.records if record.name.startswith("quire.scheduler")]


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_policy_that_evicts_is_reported_until_it_is_changed(
    policy: str,
    store: RedisStore,
    server_keys: "redis.Redis",
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eviction, "_INTERVAL", 0.01)
    caplog.set_level(logging.INFO, "quire.scheduler")
    server_keys.config_set("maxmemory-policy", policy)
    async with watched(store):
        await until_policy(policy)
        await asyncio.sleep(0.1)
        (record,) = logged_by_scheduler(caplog)
        assert (record.levelname, record.getMessage()) == ("WARNING", "Redis may evict records")
        assert vars(record)["policy"] == policy
        server_keys.config_set("maxmemory-policy", "noeviction")
        await until_policy("noeviction")
    assert [one.levelname for one in logged_by_scheduler(caplog)] == ["WARNING", "INFO"]


async def test_noeviction_is_not_logged(
    store: RedisStore, server_keys: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(store):
        await until_policy("noeviction")
    assert logged_by_scheduler(caplog) == []


async def test_a_scheduler_that_does_not_lead_any_more_has_no_policy(
    store: RedisStore, server_keys: "redis.Redis"
) -> None:
    """Another leader sees when it is changed."""
    server_keys.config_set("maxmemory-policy", "allkeys-lru")
    async with watched(store):
        await until_policy("allkeys-lru")
    assert samples() == []


async def test_a_policy_that_may_not_be_read_is_reported_as_such(
    server: RedisServer, server_keys: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    server_keys.acl_setuser(
        "limited", enabled=True, passwords=["+secret"], keys=["*"], categories=["+@all"], commands=["-info", "-config"]
    )
    url = urlsplit(server.url)
    limited = RedisStore(f"redis://limited:secret@{url.hostname}:{url.port}/0")
    async with watched(limited):
        await until_policy("unknown")
    assert limited.is_answering
    assert await limited.take_lease("a", 30) is not None
    await limited.close()
    (record,) = logged_by_scheduler(caplog)
    assert (record.levelname, record.getMessage()) == ("WARNING", "Redis' eviction policy cannot be read, by INFO")
