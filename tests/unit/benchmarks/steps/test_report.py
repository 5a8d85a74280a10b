"""The cost of steps, computed from scripted times, and their table."""

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.runner import median_of
from benchmarks.steps.report import (
    WARM_UP_STEPS,
    DeviceTimes,
    DurationPercentiles,
    SchedulerTimes,
    StepFigures,
    judge,
    steps_section,
    summarize_steps,
)

NUM_STEPS = 10


def steps(count: int) -> tuple[list[SchedulerTimes], list[DeviceTimes]]:
    """Steps of 4 sequences, planned every second: received after 2 ms, run from 100 ms to 1 s, answered 3 ms later."""
    scheduler, device = [], []
    for step_id in range(1, count + 1):
        at = float(step_id)
        scheduler.append(SchedulerTimes(step_id, 4, 4, 0.0004, at, at + 1.003, 0.0006, 0.0001))
        device.append(DeviceTimes(at + 0.002, at + 0.1, at + 1.0))
    return scheduler, device


def summarized(scheduler: list[SchedulerTimes], device: list[DeviceTimes]) -> StepFigures:
    return summarize_steps(scheduler, device, 4, 10.0, NUM_STEPS)


def test_times_of_a_step() -> None:
    figures = summarized(*steps(40))
    assert figures.schedule.p50 == pytest.approx(0.4)
    assert figures.commit.p99 == pytest.approx(0.6)
    assert figures.schedule_and_commit.p50 == pytest.approx(1.0)
    assert figures.send.p50 == pytest.approx(0.1)
    assert figures.round_trip.p50 == pytest.approx(2 + 3)
    assert figures.idle.p50 == pytest.approx(100)
    assert figures.idle_share == pytest.approx(0.1)
    assert figures.steps_per_second == pytest.approx(1.0)


def test_steps_before_and_those_with_other_work_do_not_count() -> None:
    scheduler, device = steps(WARM_UP_STEPS + NUM_STEPS + 2)
    scheduler[0].schedule = 9.0
    scheduler[-2].num_sequences, scheduler[-2].schedule = 3, 9.0
    scheduler[-1].num_tokens, scheduler[-1].schedule = 70, 9.0
    assert summarized(scheduler, device).schedule.p99 == pytest.approx(0.4)


def test_a_step_without_an_answer_does_not_count() -> None:
    scheduler, device = steps(WARM_UP_STEPS + NUM_STEPS)
    scheduler[-1].answered = None
    with pytest.raises(ValueError, match="9 steps of 4 sequences, not 10"):
        summarized(scheduler, device)


def test_only_one_case_has_targets() -> None:
    scheduler, device = steps(40)
    for step in scheduler:
        step.num_sequences = step.num_tokens = 256
    case = summarize_steps(scheduler, device, 256, 10.0, NUM_STEPS)
    assert [(v["value"], v["holds"]) for v in judge([summarized(*steps(40)), case])] == [
        (pytest.approx(1.0), True),
        (pytest.approx(5.0), False),
        (pytest.approx(0.1), False),
    ]
    assert judge([summarized(*steps(40))]) == []


def test_each_figure_of_several_runs_is_the_median() -> None:
    runs = []
    for late in (0.0, 0.004, 0.001):
        scheduler, device = steps(40)
        for step in scheduler:
            step.answered = (step.answered or 0.0) + late
            step.schedule += 0.004 - late
        runs.append(summarized(scheduler, device))
    figures = median_of(runs)
    assert figures.round_trip.p50 == pytest.approx(2 + 3 + 1)
    assert figures.schedule.p99 == pytest.approx(0.4 + 3)
    assert (figures.num_sequences, figures.num_steps) == (4, NUM_STEPS)
    assert figures.steps_per_second == pytest.approx(1.0)


SPREAD = DurationPercentiles(0.5, 1.25)


def test_a_case_is_a_row_and_a_miss_is_marked() -> None:
    case = StepFigures(
        256, 10.0, 300, SPREAD, SPREAD, SPREAD, SPREAD, DurationPercentiles(1.5, 2.0), SPREAD, 0.024, 97.0
    )
    machine = {"cores": 2, "processor": "A processor"}
    about = {"date": "2026-01-02T03:04:05+00:00", "commit": None, "machine": machine, "num_steps": 300, "num_runs": 5}
    exchanges = {
        "direct": {"round_trip": 0.2, "processor": 0.15},
        "event_engine": {"round_trip": 0.4, "processor": 0.25},
    }
    head: dict[str, Any] = {**about, "exchange_bytes": 1500, "exchanges": exchanges}
    section = steps_section({**head, "cases": [asdict(case)], "targets": judge([case])})
    assert "over 300 steps, medians of 5 runs in turns;" in section
    assert "| 256 | 10 | 0.50 / 1.25 |" in section
    assert "schedule + commit, p50, ms: 0.5, target < 1.5;" in section
    assert "1.5, target < 1: missed**" in section
    assert "0.024, target < 0.03" in section
    assert "1,500 bytes there and back through gRPC alone: 0.20 ms, 0.15 ms of processor time" in section
    assert "grpcio's default, 0.40 ms, 0.25 ms of" in section
