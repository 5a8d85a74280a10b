"""How many requests per minute an account may submit: counted from leases of a bucket that all schedulers share."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.admission import AdmissionRefusal
from scheduler_svc.core.events import Failure
from scheduler_svc.store.base import BucketCall, BucketKind, Store, StoreUnavailable

_MAX_ACCOUNTS = 10_000  # whose leases are kept
_MAX_CALLS = 10_000  # of several requests, some of which are to come
_LEASE_SECONDS = 1  # for which a lease lasts at the account's rate; at least one request
_MAX_AGE = 2.0  # seconds until what is left of a lease is returned with the next request


@dataclass(slots=True)
class _RequestLease:
    """`num_left` requests may be submitted until `ends_at`, at the rate of `per_minute` only. `call` is repeated until
    it is answered.
    """

    term: str
    number: int = 0
    num_left: int = 0
    per_minute: int = 0
    ends_at: float = 0.0
    call: BucketCall | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def has(self, num_requests: int, per_minute: int, now: float) -> bool:
        """Whether so many requests may be submitted now, at this rate."""
        return self.num_left >= num_requests and self.per_minute == per_minute and now < self.ends_at


@dataclass(slots=True)
class _CountedCall:
    """A call whose requests are counted, or all rejected. `num_left` of them are to come."""

    num_left: int
    refusal: AdmissionRefusal | None


class RequestRates:
    """The leases of all accounts with a limit, in one term."""

    def __init__(self, store: Store, term: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._term = term
        self._clock = clock
        self._num_leases = 0
        self._leases: dict[str, _RequestLease] = {}  # by account, the last one used at the end
        self._calls: dict[bytes, _CountedCall] = {}  # by id, the oldest first

    async def refuse(
        self, limits: AccountLimits, call_id: bytes = b"", num_requests: int = 1
    ) -> AdmissionRefusal | None:
        """Counts a request, or returns why it is rejected.

        The `num_requests` of a call of several are counted with the first of them that comes: all of them, or none. So
        the time to wait is that for the whole call.
        """
        per_minute = limits.requests_per_minute
        if per_minute is None:
            return None
        lease = self._lease(limits.account)
        async with lease.turn:
            if num_requests <= 1:
                return await self._count(lease, limits.account, per_minute, 1)
            call = self._calls.pop(call_id, None)
            if call is None:
                call = _CountedCall(num_requests, await self._count(lease, limits.account, per_minute, num_requests))
            call.num_left -= 1
            if call.num_left:
                self._calls[call_id] = call
                if len(self._calls) > _MAX_CALLS:
                    del self._calls[next(iter(self._calls))]
            return call.refusal

    def give_back(self, limits: AccountLimits) -> None:
        """A request that was counted does not run: it joins one that exists, or cannot be recorded."""
        lease = self._leases.get(limits.account)
        if lease is not None and limits.requests_per_minute is not None:
            lease.num_left += 1

    def _lease(self, account: str) -> _RequestLease:
        lease = self._leases.pop(account, None)
        if lease is None:
            self._num_leases += 1
            lease = _RequestLease(f"{self._term}.{self._num_leases}")
        self._leases[account] = lease
        if len(self._leases) > _MAX_ACCOUNTS:
            del self._leases[next(iter(self._leases))]
        return lease

    async def _count(
        self, lease: _RequestLease, account: str, per_minute: int, num_requests: int
    ) -> AdmissionRefusal | None:
        """Counts requests, or returns why they are rejected."""
        seconds = 0.0
        try:
            if lease.call is not None and not lease.has(num_requests, per_minute, self._clock()):
                await self._send(lease, lease.call)
            if not lease.has(num_requests, per_minute, self._clock()):
                seconds = await self._send(lease, _next_call(lease, account, per_minute, num_requests))
        except StoreUnavailable:
            message = "the store cannot be reached, and requests of a key with requests_per_minute need it"
            return AdmissionRefusal(Failure.STORE_DEGRADED, message)
        if lease.num_left < num_requests:
            message = f"the requests_per_minute of the key, {per_minute}, are used up"
            if num_requests > 1:
                message = f"the call has {num_requests} requests, and the key has fewer left of {per_minute} per minute"
            return AdmissionRefusal(Failure.TENANT_OVER_QUOTA, message, max(1.0, math.ceil(seconds)))
        lease.num_left -= num_requests
        return None

    async def _send(self, lease: _RequestLease, call: BucketCall) -> float:
        """Takes requests out of the account's bucket; returns how many seconds it takes until there are enough."""
        lease.call = call
        answer = (await self._store.call_buckets([call]))[0]
        lease.call = None
        lease.num_left += answer.num_taken
        lease.per_minute = call.per_minute
        lease.ends_at = self._clock() + _MAX_AGE
        return answer.seconds


def _next_call(lease: _RequestLease, account: str, per_minute: int, num_requests: int) -> BucketCall:
    """Returns what is left of a lease to the bucket, which holds a minute's requests at the rate of now, and takes at
    least `num_requests`.
    """
    lease.number += 1
    most = max(num_requests, per_minute * _LEASE_SECONDS // 60)
    returned, lease.num_left = lease.num_left, 0
    return BucketCall(BucketKind.REQUESTS, account, lease.term, lease.number, per_minute, most, num_requests, returned)
