"""How long a request is predicted to wait for a sequence slot."""

from typing import Any

import pytest

from core_bench import SHAPE, CoreBench, prompt
from scheduler_svc.core.events import Failure
from scheduler_svc.core.explain import explain
from scheduler_svc.core.policy.preemption import MIN_STEPS
from scheduler_svc.core.request import Request

STEP = 0.1  # seconds
NUM_SLOTS = SHAPE.max_sequences


def busy(num_left: int) -> CoreBench:
    """One slot, held by a sequence that has so many tokens to go; steps with one decode are learned to take STEP."""
    bench = CoreBench(max_sequences=1)
    bench.submit("runs", prompt(8), 400 + num_left)
    for _ in range(400):
        bench.now += STEP
        bench.step(busy_seconds=STEP)
    bench.now += 2.0
    return bench


def flooded(policy: str = "fair") -> CoreBench:
    """A tenant's requests of 1,000 tokens hold all slots, and as many wait; steps are learned to take STEP."""
    bench = CoreBench(policy=policy, num_blocks=4000)
    for number in range(2 * NUM_SLOTS):
        bench.submit(f"flood-{number}", prompt(5, 100 * number), 1000, tenant="flood")
    for _ in range(3 * MIN_STEPS):
        bench.now += STEP
        bench.step(busy_seconds=STEP)
    return bench


def asked(bench: CoreBench, tenant: str = "other", **fields: Any) -> Request:
    return Request("asked", prompt(3, 90_000), 1, 3, arrived_at=bench.now, tenant=tenant, **fields)


def slot_seconds(bench: CoreBench, **fields: Any) -> float:
    return bench.scheduler.slot_wait.seconds(asked(bench, **fields))


def test_first_slot_is_free_when_the_first_running_sequence_ends() -> None:
    bench = busy(50)
    assert slot_seconds(bench) == pytest.approx(50 * STEP, rel=0.1)


def test_no_wait_for_a_slot_is_predicted_while_there_is_one() -> None:
    bench = busy(50)
    bench.scheduler.cancel("runs")
    bench.now += 2.0
    assert slot_seconds(bench) == 0.0


def test_deadline_before_a_slot_is_free_is_rejected() -> None:
    bench = busy(50)
    request = Request("late", prompt(8, 500), 1, 1, arrived_at=bench.now, deadline=bench.now + 2.0)
    rejected = bench.scheduler.check(request, bench.now)
    assert rejected is not None
    assert rejected.reason is Failure.DEADLINE_INFEASIBLE
    in_time = Request("in time", prompt(8, 500), 1, 1, arrived_at=bench.now, deadline=bench.now + 8.0)
    assert bench.scheduler.check(in_time, bench.now) is None


def test_tenant_that_holds_all_slots_waits_until_a_sequence_ends_and_another_tenant_does_not() -> None:
    bench = flooded()
    assert slot_seconds(bench, tenant="flood") > 500 * STEP
    assert slot_seconds(bench) == 0.0


def test_without_shares_all_wait_until_a_sequence_ends() -> None:
    assert slot_seconds(flooded("fcfs")) > 500 * STEP


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_higher_class_of_the_same_tenant_does_not_wait(policy: str) -> None:
    bench = flooded(policy)
    assert slot_seconds(bench, tenant="flood", priority=1) == 0.0
    assert slot_seconds(bench, tenant="flood", priority=-1) > 500 * STEP


def test_sequences_that_run_for_a_few_steps_yield_after_some_more() -> None:
    bench = flooded()
    for number in range(2 * NUM_SLOTS):
        bench.scheduler.cancel(f"flood-{number}")
    for number in range(NUM_SLOTS):
        bench.submit(f"new-{number}", prompt(5, 50_000 + 100 * number), 1000, tenant="flood")
    for _ in range(4):
        bench.now += STEP
        bench.step(busy_seconds=STEP)
    assert 0 < slot_seconds(bench) <= MIN_STEPS * STEP * 1.5


def test_turn_comes_when_a_tenant_has_received_enough_by_its_own_sequences() -> None:
    """Two tenants share the slots. A third, whose weight is too small for one of them, gets one after 640 tokens."""
    bench = CoreBench(policy="fair", num_blocks=4000)
    for number in range(4 * NUM_SLOTS):
        bench.submit(f"flood-{number}", prompt(5, 100 * number), 1000, tenant=f"flood-{number % 2}")
    for _ in range(3 * MIN_STEPS):
        bench.now += STEP
        bench.step(busy_seconds=STEP)
    request = asked(bench, weight=0.1)
    predicted = bench.scheduler.slot_wait.seconds(request)
    assert bench.scheduler.submit(request, bench.now) is None
    [sequence] = bench.scheduler.sequences("asked")
    begin = bench.now
    while not sequence.num_output:
        bench.now += STEP
        bench.step(busy_seconds=STEP)
    assert predicted == pytest.approx(640 / (NUM_SLOTS / 2) * STEP, rel=0.2)
    assert predicted == pytest.approx(bench.now - begin, rel=0.2)


def test_short_request_is_accepted_beside_a_flood_of_another_tenant_and_explained_so() -> None:
    bench = flooded()
    bench.now += 2.0
    soon = bench.now + 5.0
    refused = bench.scheduler.check(asked(bench, tenant="flood", deadline=soon), bench.now)
    assert refused is not None
    assert refused.reason is Failure.DEADLINE_INFEASIBLE
    request = asked(bench, deadline=soon)
    assert bench.scheduler.submit(request, bench.now) is None
    explanation = explain(bench.scheduler, "asked", bench.now)
    assert explanation is not None
    predicted = explanation.sequences[0].predicted_start
    assert predicted is not None
    assert predicted < 1.0
    [sequence] = bench.scheduler.sequences("asked")
    while bench.scheduler.is_live("asked"):
        bench.now += STEP
        bench.step(busy_seconds=STEP)
    assert bench.now < soon
    assert sequence.num_output == 3
