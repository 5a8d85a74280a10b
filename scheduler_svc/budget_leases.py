"""Leases tokens for the budgets of accounts, ahead of need, from buckets that all schedulers share.

What is leased and not spent when this scheduler dies is lost to the account.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from scheduler_svc.core.budgets import Budget, Budgets
from scheduler_svc.store.base import BucketAnswer, BucketCall, BucketKind, Store, StoreUnavailable

_TICK = 0.02  # seconds between checks of what accounts need, while any has a limit
_RETRY = 0.2  # seconds until a call that failed is repeated
_MAX_WAIT = 1.0  # seconds after which a bucket that had too little is asked again: its rate may have changed
_IDLE = 2.0  # seconds after the last request of an account, when its lease is returned


@dataclass(slots=True)
class _Lease:
    """One budget's calls. `call` is repeated until it is answered."""

    budget: Budget
    number: int = 0
    call: BucketCall | None = None
    waits_until: float = 0.0
    is_short: bool = False  # whether the bucket had less than was asked for at the last call
    idle_since: float | None = None

    def next_call(self, now: float) -> BucketCall | None:
        """What to ask for now; None while there is nothing."""
        if self.budget.num_live or self.budget.promised:
            self.idle_since = None
            demand = self.budget.demand
            return None if demand is None or now < self.waits_until else self._make(demand.most, demand.least)
        self.idle_since = self.idle_since if self.idle_since is not None else now
        if now < self.idle_since + _IDLE:
            return None
        return self._make(0, 0, self.budget.take_back())

    def _make(self, most: int, least: int, returned: int = 0) -> BucketCall:
        self.number += 1
        budget = self.budget
        rate, spent = budget.tokens_per_minute, budget.spent
        return BucketCall(
            BucketKind.TOKENS, budget.account, budget.term, self.number, rate, most, least, returned, spent
        )


class BudgetLeases:
    """Keeps every budget supplied. One call at a time serves all accounts that need tokens."""

    def __init__(self, budgets: Budgets, store: Store, on_short: Callable[[Budget], None]) -> None:
        """`on_short` is called when the bucket of an account has less than its requests need."""
        self._on_short = on_short
        self._budgets = budgets
        self._store = store
        self._leases: dict[Budget, _Lease] = {}
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Something needs tokens before it can run."""
        self._budgets.has_new_demand = False
        self._wake.set()

    async def run(self) -> None:
        """Leases until cancelled. Without the store, what is leased is all there is."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK if len(self._budgets) else None):
                    await self._wake.wait()
            self._wake.clear()
            leases = self._due(time.monotonic())
            if not leases:
                continue
            try:
                answers = await self._store.call_buckets([lease.call for lease in leases if lease.call is not None])
            except StoreUnavailable:
                await asyncio.sleep(_RETRY)
                continue
            now = time.monotonic()
            for lease, answer in zip(leases, answers, strict=True):
                self._take(lease, answer, now)

    def _due(self, now: float) -> list[_Lease]:
        """The leases that have something to ask for."""
        for budget in self._budgets:
            lease = self._leases.setdefault(budget, _Lease(budget))
            lease.call = lease.call or lease.next_call(now)
        return [lease for lease in self._leases.values() if lease.call is not None]

    def _take(self, lease: _Lease, answer: BucketAnswer, now: float) -> None:
        call, lease.call = lease.call, None
        assert call is not None
        if not call.most:  # the lease was returned
            if self._budgets.forget(lease.budget):
                del self._leases[lease.budget]
            return
        was_short, lease.is_short = lease.is_short, answer.num_taken < call.most
        if answer.num_taken:
            lease.budget.grant(answer.num_taken)
        else:
            lease.waits_until = now + min(max(answer.seconds, _TICK), _MAX_WAIT)
        if lease.is_short:
            missing = answer.seconds * call.per_minute / 60
            lease.budget.note_bucket(0.0 if answer.num_taken else call.least - missing, now)
            if not was_short:
                self._on_short(lease.budget)
