"""Buckets of tokens and requests: no more is taken than was put in, and a call that is repeated takes nothing more."""

import time
from dataclasses import replace
from hashlib import sha256

import pytest
import redis

from request_logs import request_log
from scheduler_svc.store.base import BucketCall, BucketKind, PromptCharge, Spent, StoreUnavailable, WriteBatch
from scheduler_svc.store.redis import RedisStore
from store_writes import EPOCH, write_of

KEY = "{quire}:bucket:tokens:" + sha256(b"search/batch").hexdigest()


def call(number: int = 1, most: int = 100, least: int = 1, **fields: object) -> BucketCall:
    usual = BucketCall(BucketKind.TOKENS, "search/batch", "7.1", number, 600, most, least)
    return replace(usual, **fields)  # type: ignore[arg-type]


async def taken(store: RedisStore, *calls: BucketCall) -> list[int]:
    return [answer.num_taken for answer in await store.call_buckets(calls)]


async def test_a_new_bucket_holds_a_minutes_tokens_and_fills_by_the_clock(
    store: RedisStore, keys: "redis.Redis"
) -> None:
    started = time.monotonic()
    assert await taken(store, call(1, 400), call(2, 400, 400)) == [400, 0]
    assert await taken(store, call(3, 400)) == [pytest.approx(200, abs=10 * (time.monotonic() - started) + 1)]
    keys.hset(KEY, "at", int(time.time() * 1e6) - 30_000_000)  # half a minute ago
    half = await taken(store, call(4, 10_000))
    assert 300 <= half[0] <= 300 + 10 * (time.monotonic() - started) + 1
    keys.hset(KEY, "at", int(time.time() * 1e6) - 3_000_000_000)
    assert await taken(store, call(5, 10_000)) == [600]  # it holds no more than that


@pytest.mark.parametrize("field", ["level", "at", "number", "spent", None])
async def test_a_malformed_bucket_is_replaced_and_others_are_not(
    field: str | None, store: RedisStore, keys: "redis.Redis"
) -> None:
    other = call(1, 100, account="other")
    assert await taken(store, call(1, 600), other) == [600, 100]
    if field is None:
        keys.delete(KEY)
        keys.sadd(KEY, "x")
    else:
        keys.hset(KEY, field, "many")
    await store.write(WriteBatch(spending=[Spent("search/batch", "7.1", 5)], writes=[]), EPOCH)
    assert await taken(store, call(2, 400, spent=7), replace(other, number=2, least=600, most=600)) == [400, 0]


async def test_a_redis_without_memory_neither_answers_a_call_nor_fills_the_bucket(
    store: RedisStore, keys: "redis.Redis"
) -> None:
    assert await taken(store, call(1, 600)) == [600]
    keys.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreUnavailable):
            await taken(store, call(2, 500, 400))
    finally:
        keys.config_set("maxmemory", 0)
    assert float(keys.hget(KEY, "level") or "nan") == 0


async def test_the_answer_says_when_the_bucket_has_enough(store: RedisStore) -> None:
    assert await taken(store, call(1, 600)) == [600]
    answer = (await store.call_buckets([call(2, 500, 300)]))[0]
    assert answer.num_taken == 0
    assert 0 < answer.seconds <= 30.001


async def test_repeated_and_late_calls_take_nothing(store: RedisStore) -> None:
    assert await taken(store, call(1, 100), call(1, 100), call(1, 100)) == [100, 100, 100]
    assert await taken(store, call(2, 50)) == [50]
    assert await taken(store, call(1, 100)) == [0]  # it arrives after the later one
    assert await taken(store, call(1, 20, term="8.1")) == [20]  # another leader counts anew
    assert (await taken(store, call(2, 10_000, term="8.1")))[0] >= 430


async def test_what_is_returned_can_be_taken_again(store: RedisStore) -> None:
    assert await taken(store, call(1, 600)) == [600]
    giving = call(2, 0, 0, returned=250)
    assert await taken(store, giving, giving) == [0, 0]
    assert (await taken(store, call(3, 600)))[0] >= 250
    assert await taken(store, call(4, 0, 0, returned=10_000), call(5, 10_000)) == [0, 600]


async def test_a_bucket_can_hold_what_one_request_needs(store: RedisStore, keys: "redis.Redis") -> None:
    """Its limit was lowered after the request had been accepted."""
    assert await taken(store, call(1, 600)) == [600]
    assert await taken(store, call(2, 900, 900)) == [0]
    keys.hset(KEY, "at", int(time.time() * 1e6) - 90_000_000)
    assert await taken(store, call(3, 900, 900)) == [900]


async def test_accounts_and_kinds_have_buckets_of_their_own_without_their_names(
    store: RedisStore, keys: "redis.Redis"
) -> None:
    calls = [call(), call(account="x"), call(kind=BucketKind.REQUESTS), *(call(account=f"{n}") for n in range(200))]
    assert await taken(store, *calls) == [100] * 203
    names = [str(name) for name in keys.scan_iter("*bucket*")]
    assert len(names) == 203
    assert not [name for name in names if "search" in name]
    assert all(0 < keys.ttl(name) <= 86400 for name in keys.scan_iter("*bucket*"))


async def test_spending_is_journaled_with_the_tokens(store: RedisStore, keys: "redis.Redis") -> None:
    log = request_log()
    await store.put(log, EPOCH)
    await store.call_buckets([call()])
    charge = PromptCharge(log.key, log.submit.submission_id, 32)
    for spent in (Spent("search/batch", "7.1", 40), Spent("search/batch", "7.1", 55), Spent("nobody", "7.1", 1)):
        batch = WriteBatch(writes=[write_of(log, 0, [1, 2])], prompt_charges=[charge], spending=[spent])
        for _ in range(2):  # a write may be repeated
            assert await store.write(batch, EPOCH) == []
    assert keys.hget(KEY, "spent") in (b"55", "55")
    await store.call_buckets([call(2, spent=60), call(1, term="8.1", spent=0), call(2, term="8.1", spent=7)])
    assert keys.hget(KEY, "spent") in (b"67", "67")
    assert len(list(keys.scan_iter("*bucket*"))) == 1
    found = await store.read(log.key)
    assert found is not None
    assert (found.prompt_cost, found.is_prompt_cost_durable) == (32, True)


async def test_the_cost_of_another_submissions_prompt_is_not_written(store: RedisStore) -> None:
    log = request_log()
    await store.put(log, EPOCH)
    await store.write(WriteBatch(prompt_charges=[PromptCharge(log.key, "another", 32)]), EPOCH)
    found = await store.read(log.key)
    assert found is not None
    assert found.prompt_cost == 0
