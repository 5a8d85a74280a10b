"""What every store does with the lease and its epochs."""

import asyncio
import time

import pytest
import redis

from request_logs import request_log
from scheduler_svc.store.base import EpochOutsideWindow, StaleEpoch, StoreUnavailable, WriteBatch
from scheduler_svc.store.redis import RedisStore

LEASE = "{quire}:lease"
DAY = 86400 * 10**6


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
    above = time.time_ns() // 1000 + 43_200_000_001
    assert await taken(store, "a", above=above) == above + 1


@pytest.mark.parametrize("above", [2**53 - 1, 2**53, 2**64 - 1, 2**64])
async def test_no_epoch_is_begun_above_one_that_is_not_exact(store: RedisStore, above: int) -> None:
    epoch = await taken(store, "a")
    with pytest.raises(EpochOutsideWindow):
        await store.take_lease("a", 30, above, epoch)
    assert store.is_answering
    assert await store.keep_lease("a", epoch, 30)
    assert await taken(store, "a") < epoch + 600 * 10**6


async def test_no_epoch_is_begun_that_is_more_than_a_day_ahead(store: RedisStore) -> None:
    now = time.time_ns() // 1000
    assert await taken(store, "a", above=now + DAY - 600 * 10**6) == now + DAY - 600 * 10**6 + 1
    with pytest.raises(EpochOutsideWindow):
        await store.take_lease("a", 30, now + DAY + 600 * 10**6)


async def test_the_window_follows_the_later_of_two_clocks(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns() // 1000
    monkeypatch.setattr("scheduler_svc.store.redis._clock", lambda: now - 100 * DAY)
    first = await taken(store, "a", above=now + DAY // 2)
    monkeypatch.setattr("scheduler_svc.store.redis._clock", lambda: now + 10 * DAY)
    assert await taken(store, "a", above=now + 10 * DAY) == now + 10 * DAY + 1
    monkeypatch.setattr("scheduler_svc.store.redis._clock", lambda: now)  # set back: the stored epoch is outside
    assert now <= await taken(store, "a") < first


@pytest.mark.parametrize(
    "stored", [2**64, 2**53, time.time_ns() // 1000 + 2 * DAY], ids=["beyond 64 bits", "beyond doubles", "in two days"]
)
async def test_a_stored_epoch_outside_the_window_is_replaced(
    stored: int, store: RedisStore, keys: "redis.Redis"
) -> None:
    keys.hset("{quire}:epoch", mapping={"epoch": str(stored), "holder": "b"})
    epoch = await taken(store, "a")
    assert epoch < time.time_ns() // 1000 + 600 * 10**6
    assert await store.keep_lease("a", epoch, 30)
    assert await store.put(request_log(), epoch) is None


async def test_a_renewed_lease_lasts_anew(store: RedisStore, keys: "redis.Redis") -> None:
    epoch = await taken(store, "a")
    keys.pexpire(LEASE, 10_000)
    assert await store.keep_lease("a", epoch, 60)
    assert keys.pttl(LEASE) > 30_000


@pytest.mark.parametrize(("setting", "value"), [("maxmemory", 1), ("min-replicas-to-write", 1)])
async def test_a_candidate_finds_that_no_lease_can_be_renewed(
    setting: str, value: int, store: RedisStore, keys: "redis.Redis"
) -> None:
    await taken(store, "a")
    keys.config_set(setting, value)
    try:
        with pytest.raises(StoreUnavailable):
            await store.leader()
    finally:
        keys.config_set(setting, 0)
    assert await store.leader() == "a"


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
