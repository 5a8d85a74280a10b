"""The cost of steps: figures from recorded times, their targets, and the section of docs/performance.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.report import Cells, Sense, origin, target, target_lines
from quire_client.bench.latency import percentile

WARM_UP_STEPS = 20
PERCENTILE_FIELDS = ("schedule", "commit", "schedule_and_commit", "send", "round_trip", "idle")
"""The durations of `StepFigures`, in the order of tables."""
_COLUMNS = (
    *("sequences", "forward", "schedule", "commit", "both", "send to sessions", "round trip", "device waits"),
    *("of the time", "steps/s"),
)


@dataclass(slots=True)
class SchedulerTimes:
    """A step at the scheduler. Clock times: `planned`, when the plan was there; `answered`, when its results were.

    Durations, in seconds: `schedule` and `commit` are the core's, `send` is for events to the sessions.
    """

    step_id: int
    num_sequences: int
    num_tokens: int
    schedule: float
    planned: float
    answered: float | None = None
    commit: float = 0.0
    send: float = 0.0


@dataclass(slots=True)
class DeviceTimes:
    """Clock times of a step at the worker: submitted to the device thread, begun and ended on the device."""

    submitted: float
    begun: float
    done: float


@dataclass(frozen=True, slots=True)
class DurationPercentiles:
    """Percentiles of a duration over steps, in milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "DurationPercentiles":
        """At least one."""
        ordered = sorted(seconds)
        return cls(percentile(ordered, 50) * 1e3, percentile(ordered, 99) * 1e3)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What steps of `num_sequences` decoding sequences cost.

    `round_trip` is from a plan at the scheduler to the step at the device thread, and from its end there to the results
    at the scheduler: conversion, serialization, transport and event loops, without the wait for the step before it.
    `idle` is how long the device had nothing to do before a step, `idle_share` the part of all time that this makes.
    """

    num_sequences: int
    forward_ms: float
    num_steps: int
    schedule: DurationPercentiles
    commit: DurationPercentiles
    schedule_and_commit: DurationPercentiles
    send: DurationPercentiles
    round_trip: DurationPercentiles
    idle: DurationPercentiles
    idle_share: float
    steps_per_second: float


def summarize_steps(
    scheduler: Sequence[SchedulerTimes],
    device: Sequence[DeviceTimes],
    num_sequences: int,
    forward_ms: float,
    num_steps: int,
) -> StepFigures:
    """Figures over the first `num_steps` steps in which every sequence decodes, after some to warm up.

    Both are in the order of steps, which are numbered from 1. Raises ValueError where there are too few such steps.
    """
    whole = [step for step in scheduler if step.num_sequences == step.num_tokens == num_sequences]
    chosen = [step for step in whole if step.answered is not None][WARM_UP_STEPS:][:num_steps]
    if len(chosen) < num_steps:
        raise ValueError(f"{len(chosen)} steps of {num_sequences} sequences, not {num_steps}")
    runs = [device[step.step_id - 1] for step in chosen]
    round_trips = [
        (run.submitted - step.planned) + ((step.answered or 0.0) - run.done)
        for step, run in zip(chosen, runs, strict=True)
    ]
    idle = [after.begun - before.done for before, after in pairwise(runs)]
    span = runs[-1].done - runs[0].done
    return StepFigures(
        num_sequences=num_sequences,
        forward_ms=forward_ms,
        num_steps=num_steps,
        schedule=DurationPercentiles.of([step.schedule for step in chosen]),
        commit=DurationPercentiles.of([step.commit for step in chosen]),
        schedule_and_commit=DurationPercentiles.of([step.schedule + step.commit for step in chosen]),
        send=DurationPercentiles.of([step.send for step in chosen]),
        round_trip=DurationPercentiles.of(round_trips),
        idle=DurationPercentiles.of(idle),
        idle_share=sum(idle) / span,
        steps_per_second=len(idle) / span,
    )


def judge(cases: Sequence[StepFigures]) -> list[dict[str, Any]]:
    """The targets, which are of 256 sequences and a forward pass of 10 ms; none where that case was not measured."""
    for case in cases:
        if (case.num_sequences, case.forward_ms) == (256, 10.0):
            values = (
                ("schedule + commit, p50, ms", case.schedule_and_commit.p50, 1.5),
                ("round trip without device time, p50, ms", case.round_trip.p50, 1.0),
                ("share of the time that the device waits", case.idle_share, 0.03),
            )
            return [target(what, value, Sense.BELOW, bound) for what, value, bound in values]
    return []


def steps_table(result: dict[str, Any]) -> Cells:
    """A row for each case; durations are p50 / p99 in milliseconds."""
    rows = []
    for case in result["cases"]:
        spreads = [f"{case[name]['p50']:.2f} / {case[name]['p99']:.2f}" for name in PERCENTILE_FIELDS]
        share = f"{case['idle_share']:.1%}"
        numbers = (str(case["num_sequences"]), f"{case['forward_ms']:g}")
        rows.append([*numbers, *spreads, share, f"{case['steps_per_second']:,.0f}"])
    return Cells(_COLUMNS, rows, num_labels=0)


def steps_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    targets = "; ".join(target_lines(result)) or "not measured"
    return (
        f"Milliseconds, p50 / p99 over {result['num_steps']} steps, medians of {result['num_runs']} runs in turns; "
        f"{origin(result)}.\n\n"
        f"{steps_table(result).markdown()}\n\n"
        f"At 256 sequences and a forward pass of 10 ms: {targets}.\n\n"
        f"{exchange_lines(result)}"
    )


def exchange_lines(result: dict[str, Any]) -> str:
    """The cost of gRPC alone, with its event engine and without."""
    direct, engine = (_exchange(result["exchanges"][polling]) for polling in ("direct", "event_engine"))
    return (
        f"A message of {result['exchange_bytes']:,} bytes there and back through gRPC alone: {direct}; where gRPC's "
        f"event engine reads the sockets, which is grpcio's default, {engine}."
    )


def _exchange(times: dict[str, float]) -> str:
    return f"{times['round_trip']:.2f} ms, {times['processor']:.2f} ms of processor time where it began"
