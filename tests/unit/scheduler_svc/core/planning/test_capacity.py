"""The rates of replicas, on which predictions depend."""

import pytest

from core_bench import CoreBench, prompt
from scheduler_svc.core.events import Failure
from scheduler_svc.core.request import Request

STEP = 0.1  # seconds


def busy(num_left: int) -> CoreBench:
    """One slot, held by a sequence that has so many tokens to go; steps with one decode are learned to take STEP."""
    bench = CoreBench(max_sequences=1)
    bench.submit("runs", prompt(8), 400 + num_left)
    for _ in range(400):
        bench.now += STEP
        bench.step(busy_seconds=STEP)
    bench.now += 2.0
    return bench


def test_first_slot_is_free_when_the_first_running_sequence_ends() -> None:
    bench = busy(50)
    assert bench.scheduler.rates(bench.now).first_slot_seconds == pytest.approx(50 * STEP, rel=0.1)


def test_no_wait_for_a_slot_is_predicted_while_there_is_one() -> None:
    bench = busy(50)
    bench.scheduler.cancel("runs")
    bench.now += 2.0
    assert bench.scheduler.rates(bench.now).first_slot_seconds == 0.0


def test_deadline_before_a_slot_is_free_is_rejected() -> None:
    bench = busy(50)
    request = Request("late", prompt(8, 500), 1, 1, arrived_at=bench.now, deadline=bench.now + 2.0)
    rejected = bench.scheduler.check(request, bench.now)
    assert rejected is not None
    assert rejected.reason is Failure.DEADLINE_INFEASIBLE
    in_time = Request("in time", prompt(8, 500), 1, 1, arrived_at=bench.now, deadline=bench.now + 8.0)
    assert bench.scheduler.check(in_time, bench.now) is None
