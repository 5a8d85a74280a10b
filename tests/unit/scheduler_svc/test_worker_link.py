"""Links to workers over real gRPC: workers that stop, that do not fit, that connect and disconnect."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from checksum_service import serve
from ports import lasting_port
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.step import MemoryPressure, StepPlan
from scheduler_svc.model_versions import WorkerName
from scheduler_svc.step_loop import _STEP_TIMEOUT
from scheduler_svc.worker_pool import WorkerPool
from svc_common.addresses import HostPort
from worker_links import ScriptedWorker, deployment, of_response, served, until


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("worker_link._REDIAL", 0.02), ("worker_pool._RESOLVE", 0.05), ("worker_link._WATCH", 0.05)):
        monkeypatch.setattr(f"scheduler_svc.{name}", seconds)


async def test_a_worker_that_stops_loses_its_sequences_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.worker_link._ANSWER_TIMEOUT", 2)
    workers = [ScriptedWorker(), ScriptedWorker()]
    async with served(*workers) as addresses, deployment(*addresses) as running:
        await running.workers(2)
        keys = [running.gateway.submit() for _ in range(4)]
        await until(lambda: bool(workers[0].steps))
        workers[0].is_running.clear()
        for key in keys:
            await running.gateway.finish(key)
        await running.workers(1)
        workers[0].is_running.set()
        await running.workers(2)  # it is used again when it continues


async def test_a_worker_that_is_gone_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.worker_link._WATCH", 3600)
    worker = ScriptedWorker()
    server, port = await serve(worker, lasting_port())
    async with deployment(f"127.0.0.1:{port}") as running:
        await running.workers(1)
        worker.gate.clear()
        key = running.gateway.submit()
        await until(lambda: bool(worker.steps))
        await server.stop(0)
        await running.workers(0)
        worker.gate.set()
        server, _ = await serve(worker, port)
        await running.gateway.finish(key)
    await server.stop(0)


class Clock:
    """The clock of a link."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of links, which advances only when the test moves it."""
    clock = Clock()
    monkeypatch.setattr("scheduler_svc.step_loop.time", clock)
    return clock


async def test_a_worker_that_answers_and_whose_device_hangs_is_dialled_again(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    worker = ScriptedWorker()
    async with served(worker) as addresses, deployment(*addresses) as running:
        await running.workers(1)
        worker.gate.clear()
        key = running.gateway.submit()
        await until(lambda: bool(worker.steps))
        clock.now += _STEP_TIMEOUT + 1
        await until(lambda: len(worker.openings) == 2)
        worker.gate.set()
        await running.gateway.finish(key)
    assert "no answer to a step in 120 s" in [getattr(record, "why", "") for record in caplog.records]


async def test_a_step_that_is_expected_to_take_long_may_take_longer(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    worker = ScriptedWorker(prefill_tokens_per_second=0.5)  # 20 s for the prompt
    async with served(worker) as addresses, deployment(*addresses) as running:
        await running.workers(1)
        worker.gate.clear()
        key = running.gateway.submit()
        await until(lambda: bool(worker.steps))
        for _ in range(3):
            clock.now += _STEP_TIMEOUT + 1
            await worker.looked_at()
        assert len(worker.openings) == 1
        clock.now += _STEP_TIMEOUT
        await until(lambda: len(worker.openings) == 2)
        worker.gate.set()
        await running.gateway.finish(key)
    assert "no answer to a step in 400 s" in [getattr(record, "why", "") for record in caplog.records]


async def test_a_worker_with_nothing_to_do_is_not_taken_for_one_that_hangs(clock: Clock) -> None:
    worker = ScriptedWorker()
    async with served(worker) as addresses, deployment(*addresses) as running:
        for _ in range(2):
            await running.gateway.finish(running.gateway.submit())
            await until(lambda: not running.engine.replicas[0].steps_in_flight)
            clock.now += 10 * _STEP_TIMEOUT
            await worker.looked_at()
            # Its timeout starts with the next step, and the watchdog checks while that step runs.
            num_steps = len(worker.steps)
            worker.gate.clear()
            key = running.gateway.submit()
            await until(lambda: len(worker.steps) > num_steps)  # noqa: B023
            clock.now += 0.9 * _STEP_TIMEOUT
            await worker.looked_at()
            worker.gate.set()
            await running.gateway.finish(key)
        assert len(worker.openings) == 1


async def test_steps_that_each_end_in_time_may_follow_each_other_for_long(clock: Clock) -> None:
    class Turnstile(ScriptedWorker):
        """Each of its answers waits for its turn."""

        turns = asyncio.Semaphore(0)

        async def Step(
            self, requests: AsyncIterator[worker_v1.StepRequest], context: Any
        ) -> AsyncIterator[worker_v1.StepResponse]:
            async for response in super().Step(requests, context):
                if response.HasField("result"):
                    await self.turns.acquire()
                yield response

    worker = Turnstile()
    async with served(worker) as addresses, deployment(*addresses) as running:
        key = running.gateway.submit(max_tokens=6)
        for num_tokens in range(1, 7):
            await until(lambda: len(worker.steps) >= num_tokens)  # noqa: B023
            clock.now += 0.9 * _STEP_TIMEOUT
            await worker.looked_at()
            worker.turns.release()
            await until(lambda: len(running.gateway.tokens.get(key, ())) >= num_tokens)  # noqa: B023
        await running.gateway.finish(key, 6)
        assert len(worker.openings) == 1


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"block_size": 8}, "worker has block size 8, and the others of its model have 4"),
        ({"num_blocks": 3}, "worker is too small: it holds 12 tokens of a sequence, and 256 are promised"),
        (
            {"oldest_protocol": 7, "newest_protocol": 9},
            "worker accepts step protocols 7 to 9, and this scheduler 1 to 3",
        ),
    ],
    ids=["block size", "context", "protocol"],
)
async def test_a_worker_that_does_not_fit_is_refused_with_both_values(
    about: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire.scheduler")
    worker, stranger = ScriptedWorker(), ScriptedWorker(**about)
    async with served(worker) as addresses, deployment(*addresses) as running:
        await running.workers(1)
        async with served(stranger) as strange:
            others = WorkerPool(running.engine, [HostPort.parse(address) for address in strange])
            pool = asyncio.create_task(others.run())
            await until(lambda: reason in [vars(record).get("why") for record in caplog.records])
            assert len(running.engine.replicas) == 1
            pool.cancel()
            await asyncio.gather(pool, return_exceptions=True)


@pytest.mark.parametrize(
    ("about", "protocol"),
    [
        ({"newest_protocol": 1}, 1),
        ({"newest_protocol": 2}, 2),
        ({"oldest_protocol": 2, "newest_protocol": 5}, 3),
    ],
)
async def test_a_stream_is_of_the_newest_protocol_that_both_accept(about: dict[str, Any], protocol: int) -> None:
    worker = ScriptedWorker(**about)
    async with served(worker) as addresses, deployment(*addresses) as running:
        await running.workers(1)
        assert [opening.protocol for opening in worker.openings] == [protocol]


async def test_a_worker_that_is_to_end_hands_its_sequences_over() -> None:
    workers = [ScriptedWorker(), ScriptedWorker()]
    async with served(*workers) as addresses, deployment(*addresses) as running:
        await running.workers(2)
        keys = [running.gateway.submit() for _ in range(4)]
        await until(lambda: bool(workers[0].steps))
        workers[0].about.is_draining = True
        await until(lambda: not workers[0].num_open)
        for key in keys:
            await running.gateway.finish(key)
        num_openings = len(workers[0].openings)
        await running.gateway.finish(running.gateway.submit())
        assert len(workers[0].openings) == num_openings == 1


async def test_the_only_worker_ends_what_it_has_and_takes_nothing_more() -> None:
    worker = ScriptedWorker()
    async with served(worker) as addresses, deployment(*addresses) as running:
        await running.workers(1)
        worker.gate.clear()
        key = running.gateway.submit()
        await until(lambda: bool(worker.steps))
        worker.about.is_draining = True
        await until(lambda: running.engine.replicas[0].is_retired)
        late = running.gateway.submit()
        worker.gate.set()
        await running.gateway.finish(key)
        await until(lambda: not worker.num_open)
        assert late not in running.gateway.tokens
        worker.about.is_draining = False
        await running.gateway.finish(late)


async def test_what_an_idle_worker_measures_of_its_memory_reaches_the_core_and_gateways() -> None:
    worker = ScriptedWorker(has_kv_in_host_memory=True)
    async with served(worker) as addresses, deployment(*addresses) as running:
        await running.workers(1)
        replica = running.engine.replicas[0]
        sent: list[scheduler_v1.Status] = []
        running.engine.watch_status(sent.append)
        watching = asyncio.create_task(running.engine.watch())
        worker.about.memory_pressure = worker_v1.MEMORY_PRESSURE_CRITICAL
        await until(lambda: replica.memory_pressure is MemoryPressure.CRITICAL)
        await until(lambda: sent[-1].models[0].memory_pressure == worker_v1.MEMORY_PRESSURE_CRITICAL)
        short = (WorkerName(addresses[0], worker.about.model), MemoryPressure.CRITICAL)
        assert list(running.engine.workers_short_of_memory(None)) == [short]
        assert list(running.engine.workers_short_of_memory("another")) == []
        # The free blocks are discarded by a step that computes nothing.
        await until(lambda: any(step.discarded_block_ids for step in worker.steps))
        worker.about.memory_pressure = worker_v1.MEMORY_PRESSURE_NONE
        await until(lambda: sent[-1].models[0].memory_pressure == worker_v1.MEMORY_PRESSURE_NONE)
        assert list(running.engine.workers_short_of_memory(None)) == []
        watching.cancel()
        await running.gateway.finish(running.gateway.submit())


async def test_a_worker_of_a_later_epoch_is_led_by_a_later_one_yet() -> None:
    worker = ScriptedWorker(epoch=time.time_ns())
    async with served(worker) as addresses, deployment(*addresses) as running:
        await running.gateway.finish(running.gateway.submit())
        assert worker.openings[0].epoch == running.engine.epoch == worker.about.epoch + 1


async def test_a_worker_of_another_leader_is_not_used() -> None:
    worker = ScriptedWorker(epoch=time.time_ns())
    async with served(worker) as addresses, deployment(*addresses) as running:
        running.leads = False
        await until(lambda: running.num_fenced > 0)
        assert not worker.openings


async def test_blocks_that_a_worker_kept_are_not_computed_again() -> None:
    worker = ScriptedWorker()
    async with served(worker) as addresses, deployment(*addresses) as running:
        worker.change = of_response(epoch=-1)
        await running.gateway.finish(running.gateway.submit())
        first, again = [step for step in worker.steps if step.new_sequences]
        assert (first.scheduled.starts[0], again.scheduled.starts[0]) == (0, 12)  # of 14 tokens, in blocks of 4


async def test_a_worker_that_is_never_ready_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(ScriptedWorker):
        async def Step(
            self, requests: AsyncIterator[worker_v1.StepRequest], context: Any
        ) -> AsyncIterator[worker_v1.StepResponse]:
            self.num_dialled += 1
            if self.num_dialled == 1:
                await asyncio.Event().wait()
            async for response in super().Step(requests, context):
                yield response

        num_dialled = 0

    monkeypatch.setattr("scheduler_svc.worker_link._READY_TIMEOUT", 0.2)
    async with served(Stuck()) as addresses, deployment(*addresses) as running:
        await running.workers(1)


async def test_a_worker_whose_inventory_is_malformed_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    class Confused(ScriptedWorker):
        async def ReportBlockHashes(
            self, request: worker_v1.ReportBlockHashesRequest, context: Any
        ) -> worker_v1.ReportBlockHashesResponse:
            return worker_v1.ReportBlockHashesResponse(device=worker_v1.BlockHashes(block_ids=[1]))

    caplog.set_level(logging.INFO, "quire.scheduler")
    async with served(Confused()) as addresses, deployment(*addresses) as running:
        await until(lambda: any("block-hash report" in str(vars(record).get("why")) for record in caplog.records))
        assert not running.engine.replicas


async def test_a_defect_that_one_worker_meets_costs_its_stream_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [ScriptedWorker(), ScriptedWorker()]
    async with served(*workers) as addresses, deployment(*addresses) as running:
        await running.workers(2)
        schedule = running.engine.schedule
        num_raised = 0

        def plan(replica: Replica) -> StepPlan | None:
            nonlocal num_raised
            if replica.name == addresses[0] and (replica.running or running.engine.num_live(None)):
                num_raised += 1
                raise RuntimeError("a defect")
            return schedule(replica)

        monkeypatch.setattr(running.engine, "schedule", plan)
        for _ in range(4):
            for key in [running.gateway.submit() for _ in range(4)]:
                await running.gateway.finish(key)
        assert num_raised
        assert running.failures == []


async def test_plans_that_fail_for_every_worker_end_the_term_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ScriptedWorker()
    async with served(worker) as addresses, deployment(*addresses) as running:
        await running.workers(1)
        schedule, is_broken = running.engine.schedule, True

        def plan(replica: Replica) -> StepPlan | None:
            """Fails with a step in flight, as where the next step meets a defect."""
            if is_broken and replica.steps_in_flight:
                raise RuntimeError("a defect")
            return schedule(replica)

        monkeypatch.setattr(running.engine, "schedule", plan)
        worker.gate.clear()
        key = running.gateway.submit()
        await until(lambda: len(running.failures) >= 2)
        assert {str(error) for error in running.failures} == {"a defect"}
        is_broken = False
        worker.gate.set()
        await running.gateway.finish(key)  # a worker that did not crash makes no request suspected
