"""Two deployments on one Redis, with different prefixes of their keys."""

import time
from collections.abc import AsyncIterator

import pytest
import redis

from redis_server import RedisServer
from request_logs import request_log
from scheduler_svc.request_log import State
from scheduler_svc.store.base import StaleEpoch, WriteBatch
from scheduler_svc.store.redis import RedisStore
from store_writes import EPOCH, ending_of, put, tokens_of, write_of

TTL = 500


@pytest.fixture
async def other(server: RedisServer, keys: "redis.Redis") -> AsyncIterator[RedisStore]:
    """The store of a second deployment on the same server."""
    store = RedisStore(server.url, TTL, "other:team.b")
    yield store
    await store.close()


async def test_each_deployment_has_a_leader_and_epochs_of_its_own(store: RedisStore, other: RedisStore) -> None:
    epoch, later = (
        await store.take_lease("a", 30),
        await other.take_lease("b", 30, above=time.time_ns() // 1000 + 10**9),
    )
    assert epoch is not None
    assert later is not None
    assert later > epoch
    assert (await store.leader(), await other.leader()) == ("a", "b")
    assert await store.keep_lease("a", epoch, 30)
    assert await store.put(request_log(), epoch) is None
    with pytest.raises(StaleEpoch):
        await other.put(request_log(), epoch)
    await other.release_lease("b")
    assert await store.leader() == "a"


async def test_records_of_one_deployment_are_not_found_or_changed_by_another(
    store: RedisStore, other: RedisStore
) -> None:
    ours, theirs = await put(store, request_log("same")), await put(other, request_log("same"), 7)
    assert ours.key == theirs.key
    assert await store.write(WriteBatch(writes=[write_of(ours, 0, [1, 2])]), EPOCH) == []
    assert await other.write(WriteBatch(endings=[ending_of(theirs)]), EPOCH) == []
    await other.renew([ours.key], EPOCH)
    assert (await tokens_of(store, ours), await tokens_of(other, theirs)) == ([[1, 2]], [[7]])
    alone = await put(store, request_log(), 3)
    assert await other.read(alone.key) is None
    assert {log.key for log in await store.live()} == {ours.key, alone.key}
    assert await other.live() == []
    found = await store.read(ours.key)
    assert found is not None
    assert found.state is State.ACCEPTED


async def test_every_key_begins_with_its_deployments_prefix(
    store: RedisStore, other: RedisStore, keys: "redis.Redis"
) -> None:
    log = await put(other, request_log(), 1, 2)
    await other.write(WriteBatch(writes=[write_of(log, 2, [3])]), EPOCH)
    await other.take_lease("b", 30)
    named = {key.decode() for key in keys.scan_iter()}
    assert len(named) >= 4
    assert {key.rpartition("}")[0] for key in named} == {"{other:team.b"}
    assert await store.leader() is None
