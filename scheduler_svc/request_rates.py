"""How many requests per minute an account may submit: counted from leases of a bucket that all schedulers share."""

import asyncio
import math
from dataclasses import dataclass, field

from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.admission import AdmissionRefusal
from scheduler_svc.core.events import Failure
from scheduler_svc.store.base import BucketCall, BucketKind, Store, StoreUnavailable

_MAX_ACCOUNTS = 10_000  # whose leases are kept
_LEASE_SECONDS = 1  # for which a lease lasts at the account's rate; at least one request


@dataclass(slots=True)
class _RequestLease:
    """`num_left` requests may be submitted. `call` is repeated until it is answered."""

    term: str
    number: int = 0
    num_left: int = 0
    call: BucketCall | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class RequestRates:
    """The leases of all accounts with a limit, in one term."""

    def __init__(self, store: Store, term: str) -> None:
        self._store = store
        self._term = term
        self._num_leases = 0
        self._leases: dict[str, _RequestLease] = {}  # by account, the last one used at the end

    async def refuse(self, limits: AccountLimits) -> AdmissionRefusal | None:
        """Counts a request, or returns why it is rejected."""
        per_minute = limits.requests_per_minute
        if per_minute is None:
            return None
        lease = self._lease(limits.account)
        async with lease.turn:
            if not lease.num_left:
                try:
                    seconds = await self._take(lease, limits.account, per_minute)
                except StoreUnavailable:
                    message = "the store cannot be reached, and requests of a key with requests_per_minute need it"
                    return AdmissionRefusal(Failure.STORE_DEGRADED, message)
                if not lease.num_left:
                    message = f"the requests_per_minute of the key, {per_minute}, are used up"
                    return AdmissionRefusal(Failure.TENANT_OVER_QUOTA, message, max(1.0, math.ceil(seconds)))
            lease.num_left -= 1
            return None

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

    async def _take(self, lease: _RequestLease, account: str, per_minute: int) -> float:
        """Takes requests out of the account's bucket; returns how many seconds it takes until there is one."""
        if lease.call is None:
            lease.number += 1
            most = max(1, per_minute * _LEASE_SECONDS // 60)
            lease.call = BucketCall(BucketKind.REQUESTS, account, lease.term, lease.number, per_minute, most, 1)
        answer = (await self._store.call_buckets([lease.call]))[0]
        lease.call = None
        lease.num_left += answer.num_taken
        return answer.seconds
