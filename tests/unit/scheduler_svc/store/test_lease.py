"""What every store does with the lease and its epochs."""

import asyncio
import time

import pytest
import redis

from request_logs import request_log
from scheduler_svc.store.base import StaleEpoch, WriteBatch
from scheduler_svc.store.redis import RedisStore

LEASE = "{quire}:lease"


async def taken(store: RedisStore, holder: str, above: int = 0) -> int:
    epoch = await store.take_lease(holder, 30, above)
    assert epoch is not None
    return epoch


async def test_one_holder_leads_until_its_lease_is_gone(store: RedisStore, keys: "redis.Redis") -> None:
    assert await store.leader() is None
    first = await taken(store, "a")
    assert await store.take_lease("b", 30) is None
    assert await store.leader() == "a"
    keys.delete(LEASE)  # it ran out
    assert await taken(store, "b") > first


async def test_a_lease_runs_out(store: RedisStore) -> None:
    await store.take_lease("a", 0.02)
    async with asyncio.timeout(60):
        while await store.take_lease("b", 30) is None:
            await asyncio.sleep(0.01)
    assert await store.leader() == "b"


async def test_an_epoch_is_above_any_before_and_above_the_floor_and_the_clock(store: RedisStore) -> None:
    started = time.time_ns() // 1000
    first = await taken(store, "a")
    assert first >= started
    second = await taken(store, "a")
    assert second > first
    assert await taken(store, "a", above=second + 10**9) == second + 10**9 + 1
    assert await taken(store, "a") == second + 10**9 + 2


async def test_an_epoch_is_not_rounded(store: RedisStore) -> None:
    above = 8_999_999_999_999_999
    assert await taken(store, "a", above=above) == above + 1


async def test_a_renewed_lease_lasts_anew(store: RedisStore, keys: "redis.Redis") -> None:
    epoch = await taken(store, "a")
    keys.pexpire(LEASE, 10_000)
    assert await store.keep_lease("a", epoch, 60)
    assert keys.pttl(LEASE) > 30_000


async def test_a_leader_whose_lease_ran_out_has_it_again_if_nobody_took_it(
    store: RedisStore, keys: "redis.Redis"
) -> None:
    epoch = await taken(store, "a")
    keys.delete(LEASE)
    assert await store.keep_lease("a", epoch, 30)
    assert await store.leader() == "a"


async def test_a_leader_that_was_paused_is_fenced_even_where_its_successor_has_left(
    store: RedisStore, keys: "redis.Redis"
) -> None:
    old = await taken(store, "a")
    keys.delete(LEASE)
    await taken(store, "b")
    assert not await store.keep_lease("a", old, 30)
    with pytest.raises(StaleEpoch):
        await store.put(request_log(), old)
    await store.release_lease("b")
    assert not await store.keep_lease("a", old, 30)
    assert await store.take_lease("a", 30, epoch=old) is None
    assert await store.leader() is None


async def test_a_leader_may_begin_a_new_epoch(store: RedisStore) -> None:
    old = await taken(store, "a")
    new = await store.take_lease("a", 30, above=old + 5, epoch=old)
    assert new is not None
    assert new > old + 5
    assert not await store.keep_lease("a", old, 30)
    assert await store.keep_lease("a", new, 30)


async def test_a_new_epoch_whose_answer_was_lost_may_be_taken_again(store: RedisStore, keys: "redis.Redis") -> None:
    old = await taken(store, "a")
    lost = await store.take_lease("a", 30, above=old + 5, epoch=old)
    keys.delete(LEASE)  # it ran out before the next call came through
    again = await store.take_lease("a", 30, above=old + 5, epoch=old)
    assert lost is not None
    assert again is not None
    assert again > lost


async def test_only_its_holder_releases_a_lease(store: RedisStore) -> None:
    await taken(store, "a")
    await store.release_lease("b")
    assert await store.leader() == "a"
    await store.release_lease("a")
    assert await store.leader() is None


async def test_a_store_that_lost_everything_learns_the_epoch_from_its_leader(
    store: RedisStore, keys: "redis.Redis"
) -> None:
    epoch = await taken(store, "a")
    keys.flushall()
    await store.write(WriteBatch([request_log()]), epoch)
    with pytest.raises(StaleEpoch):
        await store.write(WriteBatch(), epoch - 1)
    keys.flushall()
    assert await store.keep_lease("a", epoch, 30)
    assert await taken(store, "a") > epoch
