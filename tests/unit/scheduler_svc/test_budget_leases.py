"""Leases: taken ahead of need, repeated until they are answered, and returned when an account is idle."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from scheduler_svc.budget_leases import BudgetLeases
from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.budgets import Budget, Budgets
from scheduler_svc.store.base import BucketAnswer, BucketCall, Store, StoreUnavailable

LIMITS = AccountLimits("x/", tokens_per_minute=600)


class ScriptedBuckets:
    """Answers the calls for buckets only, from one bucket."""

    def __init__(self, level: int = 600) -> None:
        self.level = level
        self.calls: list[BucketCall] = []
        self.is_away = False

    async def call_buckets(self, calls: Iterable[BucketCall]) -> list[BucketAnswer]:
        calls = list(calls)
        self.calls += calls
        if self.is_away:
            raise StoreUnavailable("away")
        return [self._answer(call) for call in calls]

    def _answer(self, call: BucketCall) -> BucketAnswer:
        self.level += call.returned
        taken = min(call.most, self.level) if self.level >= call.least else 0
        self.level -= taken
        return BucketAnswer(taken, 0.0 if taken else 0.05)


class LeaseBench:
    def __init__(self, level: int = 600) -> None:
        self.store = ScriptedBuckets(level)
        self.budgets = Budgets("7", self._on_available)
        self.num_leased = 0
        self.short: list[Budget] = []
        self.leases = BudgetLeases(self.budgets, cast(Store, self.store), self.short.append)

    def _on_available(self) -> None:
        self.num_leased += 1

    def start(self) -> Budget:
        """A request of an account that needs 26 tokens."""
        charge = self.budgets.charge(LIMITS, 10, None, 0.0)
        assert charge is not None
        charge.budget.num_live += 1
        charge.budget.note_shortfall(26)
        self.leases.wake()
        return charge.budget


@asynccontextmanager
async def at_work(level: int = 600) -> AsyncIterator[LeaseBench]:
    bench = LeaseBench(level)
    running = asyncio.create_task(bench.leases.run())
    try:
        async with asyncio.timeout(60):
            yield bench
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_what_an_account_needs_is_leased() -> None:
    async with at_work() as bench:
        budget = bench.start()
        assert not bench.budgets.has_new_demand
        while not budget.available:
            await asyncio.sleep(0.001)
        assert (budget.available, bench.store.level, bench.num_leased) == (60, 540, 1)
        assert [(call.account, call.number, call.least) for call in bench.store.calls] == [("x/", 1, 26)]


async def test_a_call_is_repeated_with_its_number_until_it_is_answered() -> None:
    async with at_work() as bench:
        bench.store.is_away = True
        budget = bench.start()
        while len(bench.store.calls) < 2:
            await asyncio.sleep(0.001)
        assert not budget.available
        bench.store.is_away = False
        while not budget.available:
            await asyncio.sleep(0.001)
        assert set(bench.store.calls) == {bench.store.calls[0]}
        assert budget.available == 60


async def test_a_bucket_with_too_little_is_asked_again() -> None:
    async with at_work(level=25) as bench:
        budget = bench.start()
        while len(bench.store.calls) < 3:
            await asyncio.sleep(0.001)
        assert not budget.available
        bench.store.level = 26
        while not budget.available:
            await asyncio.sleep(0.001)
        assert [call.number for call in bench.store.calls] == list(range(1, len(bench.store.calls) + 1))


async def test_what_is_known_of_a_bucket_with_too_little_is_noted() -> None:
    async with at_work(level=25) as bench:
        budget = bench.start()
        before = time.monotonic()
        while len(bench.store.calls) < 3:
            await asyncio.sleep(0.001)
        assert bench.short == [budget]  # it was short at the second call, too
        assert budget.seconds_until(26, before) >= 0.05
        assert budget.seconds_until(26 + 6000, before) - budget.seconds_until(26, before) == pytest.approx(600)
        bench.store.level = 90
        while not budget.available:
            await asyncio.sleep(0.001)
        assert budget.available == 60
        assert budget.seconds_until(1000, before) == 0.0  # what is left in the bucket is not known


async def test_the_lease_of_an_idle_account_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.budget_leases._IDLE", 0.05)
    async with at_work() as bench:
        budget = bench.start()
        while not budget.available:
            await asyncio.sleep(0.001)
        budget.spent, budget.num_live = 26, 0
        while len(bench.budgets):
            await asyncio.sleep(0.001)
        assert bench.store.level == 600 - 26
        assert (bench.store.calls[-1].returned, bench.store.calls[-1].spent) == (34, 26)
        again = bench.start()
        assert again is not budget
        assert again.term != budget.term
