"""Which workers the engine wakes for a step, and what ends a term."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from checksum_service import ChecksumService
from memory_worker import Drawn
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.kv.block_hash_report import BlockHashReport
from scheduler_svc.core.policy import FairPolicy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.step import StepOutcome
from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.request_log import RequestLog
from scheduler_svc.step_wire import shape_from_proto
from worker_links import Deployment, deployment


@asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[SchedulerEngine, list[tuple[Replica, asyncio.Event]]]]:
    async with deployment() as running:
        yield running.engine, [joined(running) for _ in range(2)]


def joined(running: Deployment, model: str = "") -> tuple[Replica, asyncio.Event]:
    about, wake = ChecksumService().about, asyncio.Event()
    about.MergeFrom(worker_v1.DescribeResponse(model=model))
    replica = Replica(shape_from_proto(about))
    running.engine.add_worker(replica, about, wake, BlockHashReport({}, {}))
    return replica, wake


def started(engine: SchedulerEngine, key: str, deadline: float | None = None, **fields: Any) -> None:
    submit = scheduler_v1.Submit(key=key, prompt_token_ids=[1, 2], n=1, max_tokens=8, tenant="t", weight=1, **fields)
    engine.take_over([RequestLog(submit, accepted_at=1.0, deadline=deadline)])
    live = engine.requests.get(key)
    assert live is not None
    engine.requests.start(live, is_restored=True)


async def test_a_worker_that_is_given_work_by_anothers_step_is_woken() -> None:
    async with two_workers() as (engine, [(first, _), (second, wake)]):
        for key in ("a", "b"):
            started(engine, key)
        wake.clear()
        assert engine.schedule(first) is not None
        assert second.running
        assert wake.is_set()


async def test_workers_are_woken_where_a_deadline_ends_a_request() -> None:
    async with two_workers() as (engine, [(first, _), (_, wake)]):
        started(engine, "late", deadline=1.0)
        wake.clear()
        while engine.is_live("late"):
            engine.schedule(first)
        assert wake.is_set()


async def test_workers_of_all_models_are_woken_where_an_account_gets_tokens_back() -> None:
    async with deployment() as running:
        engine = running.engine
        (first, _), (second, wake) = joined(running, "a"), joined(running, "b")
        limits = scheduler_v1.AccountLimits(account="t/", tokens_per_minute=600)
        search = scheduler_v1.BeamSearch(width=4, length_penalty=1.0)
        started(engine, "search", model="a", limits=limits, beam_search=search)
        budget = next(iter(engine.budgets))
        budget.grant(2 + 4 * 8)
        assert engine.schedule(first) is not None
        started(engine, "other", model="b", limits=limits)
        assert engine.schedule(second) is None
        wake.clear()
        engine.take(scheduler_v1.SessionRequest(cancel=scheduler_v1.Cancel(key="search")), running.gateway)
        assert wake.is_set()
        assert engine.schedule(second) is not None


async def test_a_commit_that_fails_ends_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployment() as running:
        engine, (first, _), (second, _) = running.engine, joined(running), joined(running)
        for key in ("a", "b"):
            started(engine, key)
        plan = engine.schedule(first)
        assert plan is not None
        assert second.running
        monkeypatch.setattr(FairPolicy, "charge", defect)
        with pytest.raises(RuntimeError):
            engine.commit(first, StepOutcome([Drawn([7]) for _ in plan.scheduled]))
        assert [str(error) for error in running.failures] == ["a defect"]
        assert engine.schedule(second) is None, "its tokens might not follow those that gateways have"


async def test_a_worker_that_cannot_be_removed_ends_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployment() as running:
        engine, (first, _), _ = running.engine, joined(running), joined(running)
        started(engine, "a")
        assert engine.schedule(first) is not None
        monkeypatch.setattr(FairPolicy, "add", defect)
        with pytest.raises(RuntimeError):
            engine.remove_worker(first)
        assert [str(error) for error in running.failures] == ["a defect"]


def defect(*_: object) -> None:
    raise RuntimeError("a defect")
