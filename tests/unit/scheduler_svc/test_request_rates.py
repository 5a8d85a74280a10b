"""Requests per minute: counted from a lease, and from the bucket when that is used up."""

import asyncio
from collections.abc import Iterable
from typing import cast

from scheduler_svc.core.account_limits import NO_LIMITS, AccountLimits
from scheduler_svc.core.events import Failure
from scheduler_svc.request_rates import RequestRates
from scheduler_svc.store.base import BucketAnswer, BucketCall, BucketKind, Store, StoreUnavailable


class RequestBucket:
    """A bucket of requests, which gets one every 7.2 s."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.calls: list[BucketCall] = []
        self.is_away = False

    async def call_buckets(self, calls: Iterable[BucketCall]) -> list[BucketAnswer]:
        self.calls += calls
        if self.is_away:
            raise StoreUnavailable("away")
        await asyncio.sleep(0)
        call = self.calls[-1]
        self.level = min(self.level + call.returned, max(call.per_minute, call.least))
        taken = min(call.most, self.level) if self.level >= call.least else 0
        self.level -= taken
        return [BucketAnswer(taken, 0.0 if taken else 7.2 * (call.least - self.level))]


class Clock:
    """A clock that is set, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rates_of(bucket: RequestBucket, clock: Clock | None = None) -> RequestRates:
    return RequestRates(cast(Store, bucket), "7", clock or Clock())


def limits(per_minute: int, account: str = "x/") -> AccountLimits:
    return AccountLimits(account, requests_per_minute=per_minute)


async def test_as_many_as_the_bucket_has_are_accepted_then_rejected_with_a_time() -> None:
    bucket = RequestBucket(5)
    rates = rates_of(bucket)
    refusals = await asyncio.gather(*(rates.refuse(limits(120)) for _ in range(6)))
    assert refusals[:5] == [None] * 5
    last = refusals[5]
    assert last is not None
    assert (last.failure, last.retry_after) == (Failure.TENANT_OVER_QUOTA, 8.0)
    assert [(call.kind, call.most, call.number) for call in bucket.calls] == [
        (BucketKind.REQUESTS, 2, number) for number in (1, 2, 3, 4)
    ]


async def test_without_the_store_the_lease_is_used_up_and_the_call_is_repeated_later() -> None:
    bucket = RequestBucket(2)
    rates = rates_of(bucket)
    assert await rates.refuse(limits(120)) is None
    bucket.is_away = True
    assert await rates.refuse(limits(120)) is None
    for _ in range(2):
        refusal = await rates.refuse(limits(120))
        assert refusal is not None
        assert refusal.failure is Failure.STORE_DEGRADED
    assert [call.number for call in bucket.calls] == [1, 2, 2]
    rates.give_back(limits(120))
    assert await rates.refuse(limits(120)) is None


async def test_accounts_have_leases_of_their_own_and_none_is_needed_without_a_limit() -> None:
    bucket = RequestBucket(2)
    rates = rates_of(bucket)
    assert await rates.refuse(NO_LIMITS) is None
    assert not bucket.calls
    assert await rates.refuse(limits(60)) is None
    assert await rates.refuse(limits(60, "y/")) is None
    assert len({call.term for call in bucket.calls}) == 2


async def test_the_requests_of_a_call_are_counted_together() -> None:
    bucket = RequestBucket(5)
    rates = rates_of(bucket)
    refusals = await asyncio.gather(*(rates.refuse(limits(10), b"one", 3) for _ in range(3)))
    assert refusals == [None] * 3
    assert bucket.level == 2
    assert [(call.most, call.least) for call in bucket.calls] == [(3, 3)]


async def test_a_call_without_room_for_all_its_requests_takes_none_and_waits_for_all() -> None:
    bucket = RequestBucket(2)
    rates = rates_of(bucket)
    for call_id in (b"one", b"again"):
        refusals = await asyncio.gather(*(rates.refuse(limits(10), call_id, 3) for _ in range(3)))
        assert [refusal.retry_after for refusal in refusals if refusal is not None] == [8.0] * 3
    refused = await rates.refuse(limits(10), b"more", 4)
    assert refused is not None
    assert (refused.failure, refused.retry_after) == (Failure.TENANT_OVER_QUOTA, 15.0)
    assert "4 requests" in refused.message
    assert [await rates.refuse(limits(10)) for _ in range(2)] == [None] * 2  # a smaller call may still come


async def test_a_call_takes_what_the_lease_has_first() -> None:
    bucket = RequestBucket(8)
    rates = rates_of(bucket)
    assert await rates.refuse(limits(300)) is None  # of a lease of 5
    assert await rates.refuse(limits(300), b"one", 7) is None
    assert bucket.level == 0
    assert await rates.refuse(limits(300), b"two", 2) is not None


async def test_a_lease_ends_with_its_rate() -> None:
    bucket = RequestBucket(6000)
    rates = rates_of(bucket)
    assert await rates.refuse(limits(6000)) is None  # of a lease of 100
    refusals = [await rates.refuse(limits(2)) for _ in range(3)]
    assert refusals[:2] == [None] * 2
    assert refusals[2] is not None


async def test_what_is_left_of_an_old_lease_is_returned() -> None:
    bucket, clock = RequestBucket(200), Clock()
    rates = rates_of(bucket, clock)
    assert await rates.refuse(limits(6000)) is None
    assert bucket.level == 100
    clock.now += 2
    assert await rates.refuse(limits(6000)) is None
    assert bucket.calls[-1].returned == 99
    assert bucket.level == 99


async def test_a_call_is_not_counted_while_it_is_not_known_what_was_taken() -> None:
    bucket = RequestBucket(10)
    rates = rates_of(bucket)
    bucket.is_away = True
    refusals = [await rates.refuse(limits(60), b"one", 2) for _ in range(2)]
    assert {refusal.failure for refusal in refusals if refusal is not None} == {Failure.STORE_DEGRADED}
    assert len(bucket.calls) == 1  # the second one is rejected with the first
    bucket.is_away = False
    assert await rates.refuse(limits(60), b"two", 4) is None
    assert [(call.number, call.least, call.returned) for call in bucket.calls] == [(1, 2, 0), (1, 2, 0), (2, 4, 2)]
    assert bucket.level == 6
