"""Requests per minute: counted from a lease, and from the bucket when that is used up."""

import asyncio
from collections.abc import Iterable
from typing import cast

from scheduler_svc.core.account_limits import NO_LIMITS, AccountLimits
from scheduler_svc.core.events import Failure
from scheduler_svc.request_rates import RequestRates
from scheduler_svc.store.base import BucketAnswer, BucketCall, BucketKind, Store, StoreUnavailable


class RequestBucket:
    """A bucket of requests."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.calls: list[BucketCall] = []
        self.is_away = False

    async def call_buckets(self, calls: Iterable[BucketCall]) -> list[BucketAnswer]:
        self.calls += calls
        if self.is_away:
            raise StoreUnavailable("away")
        await asyncio.sleep(0)
        taken = min(self.calls[-1].most, self.level)
        self.level -= taken
        return [BucketAnswer(taken, 0.0 if taken else 7.2)]


def rates_of(bucket: RequestBucket) -> RequestRates:
    return RequestRates(cast(Store, bucket), "7")


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
