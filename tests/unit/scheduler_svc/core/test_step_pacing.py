"""When the next step is planned: shortly before the running one is expected to end."""

import pytest

from core_bench import CoreBench, prompt
from scheduler_svc.core.step_pacing import StepPacing


def paced(seconds: float | None, num_sequences: int = 2) -> tuple[CoreBench, StepPacing]:
    """A replica whose decodes take so many seconds each, as far as it knows, and which runs one step of decodes."""
    bench = CoreBench()
    for number in range(num_sequences):
        bench.submit(str(number), prompt(3, 1000 * number), 150)
    bench.steps(3)
    if seconds is not None:
        for _ in range(200):
            bench.replica.costs.observe_step(0, num_sequences, seconds * num_sequences)
    pacing = StepPacing(bench.replica)
    assert bench.plan() is not None
    return bench, pacing


def test_a_step_is_planned_at_once_where_none_runs() -> None:
    bench = CoreBench()
    assert StepPacing(bench.replica).seconds_until_next(5.0) == 0.0


@pytest.mark.parametrize(
    ("per_decode", "wait"),
    [(0.1, 0.14), (0.03, 0.03), (0.015, 0.0), (0.001, 0.0)],
    ids=["30 % ahead", "30 ms ahead", "as long as that", "shorter"],
)
def test_the_next_step_is_planned_ahead_of_the_expected_end(per_decode: float, wait: float) -> None:
    _, pacing = paced(per_decode)
    assert pacing.seconds_until_next(10.0) == pytest.approx(wait, abs=0.002)


def test_the_time_runs_from_the_beginning_of_the_running_step() -> None:
    bench, pacing = paced(0.1)
    assert pacing.seconds_until_next(10.0) == pytest.approx(0.14, abs=0.002)
    assert pacing.seconds_until_next(10.1) == pytest.approx(0.04, abs=0.002)
    assert pacing.seconds_until_next(10.2) == 0.0, "later than expected"
    assert bench.plan() is not None
    assert pacing.seconds_until_next(10.3) == 0.0, "the same step runs"
    bench.commit()
    assert pacing.seconds_until_next(10.4) == pytest.approx(0.14, abs=0.002), "the second one has begun"
    bench.commit()
    assert pacing.seconds_until_next(10.41) == 0.0, "nothing runs"


def run_held_back(idle_seconds: float, num_steps: int) -> float:
    """How long the next step is held back after so many that were, before each of which the device was idle so long."""
    bench, pacing = paced(0.1)
    now = 0.0
    for _ in range(num_steps):
        now += 1.0
        assert pacing.seconds_until_next(now) > 0
        assert pacing.seconds_until_next(now + 0.198) == 0.0
        step = bench.plan()
        assert step is not None
        pacing.note_planned(step.step_id)
        bench.commit()
        pacing.note_end(step.step_id, 0.2, idle_seconds)
    return pacing.seconds_until_next(now + 1.0)


def test_the_lead_becomes_shorter_while_the_device_does_not_wait() -> None:
    assert run_held_back(0.0, 10) == pytest.approx(0.2 - 0.06 * 0.98**10, abs=0.002)
    assert run_held_back(0.0, 130) == pytest.approx(0.2 - 0.006, abs=0.002), "its least"


def test_the_lead_becomes_longer_where_the_device_waits() -> None:
    assert run_held_back(0.0, 50) > run_held_back(0.001, 50) > run_held_back(0.004, 50)
    assert run_held_back(0.004, 50) == pytest.approx(0.14, abs=0.002), "its most"


def test_steps_that_were_not_held_back_say_nothing() -> None:
    bench, pacing = paced(0.1)
    assert pacing.seconds_until_next(1.0) > 0
    pacing.note_planned(None)  # there was nothing to plan: what comes later was not held back
    step = bench.plan()
    assert step is not None
    pacing.note_planned(step.step_id)
    bench.commit()
    pacing.note_end(step.step_id, 0.2, 5.0)
    pacing.note_end(step.step_id + 1, 0.2, 0.0)
    assert pacing.seconds_until_next(2.0) == pytest.approx(0.14, abs=0.002)


def test_steps_of_unknown_costs_are_planned_at_once() -> None:
    bench, pacing = paced(None)
    assert not bench.replica.costs.has_learned
    bench.replica.costs.observe_step(0, 2, 10.0)
    assert pacing.seconds_until_next(10.0) == 0.0
