"""One tenant fills all slots and blocks with long jobs; another one sends 500 chats: their time to the first token."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.report import Cells, Sense
from benchmarks.simulator.arrivals import Arrival, OpenLoop, merged
from benchmarks.simulator.device import StepCompletion
from benchmarks.simulator.driver import Replica, Setup
from benchmarks.simulator.figures import Percentiles
from benchmarks.simulator.machine import Machine
from benchmarks.simulator.presets import CPU_SMOLLM, GPU_8B
from benchmarks.simulator.scenarios.scenario import Scenario, Target, outcome
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.synthetic import ArrivalProcess, ArrivalStream, Lengths
from quire_client.bench.latency import percentile

POLICIES = ("fcfs", "fair")
CASES = ((GPU_8B, 5.0, 400), (CPU_SMOLLM, 0.6, 100))
"""Machine, chats a second, and jobs, all of which arrive at the start, and more than are computed until the end."""
NUM_CHATS = 500
FIRST_CHAT = 10.0  # seconds after the jobs
MAX_STEPS = 3  # until a first token: one until a slot is free, two in flight
CHATS, JOBS = "chats", "jobs"


def measure(
    report: Callable[[str], None], cases: Sequence[tuple[Machine, float, int]] = CASES, num_chats: int = NUM_CHATS
) -> dict[str, Any]:
    """Seconds from a chat's arrival to its first token, alone and beside the jobs, and what the jobs lose."""
    rows: list[dict[str, Any]] = []
    for machine, rate, num_jobs in cases:
        seconds = FIRST_CHAT + num_chats / rate
        jobs, chats = _jobs(num_jobs), _chats(rate, num_chats)
        report(f"{machine.name}: chats alone, jobs alone")
        idle = _run(machine, "fair", chats, seconds)
        step_seconds: list[float] = []
        alone = _run(machine, "fair", jobs, seconds, step_seconds)
        mean_step, long_step = sum(step_seconds) / len(step_seconds), percentile(sorted(step_seconds), 99)
        first_token = _first_token(idle)
        for policy in POLICIES:
            report(f"{machine.name}, {policy}: chats beside jobs")
            ends: list[float] = []
            run = _run(machine, policy, merged(chats, jobs), seconds, ends=ends)
            beside, num_steps = _first_token(run), _steps_to_first_token(run, ends)
            steps = Percentiles.of(num_steps)
            assert steps is not None
            totals = run.recorder.usage_by_tenant
            rows.append(
                {
                    "machine": machine.name,
                    "policy": policy,
                    "idle_p50": first_token.p50,
                    "idle_p99": first_token.p99,
                    "p50": beside.p50,
                    "p99": beside.p99,
                    "steps_p50": steps.p50,
                    "steps_p99": steps.p99,
                    "in_time": sum(count <= MAX_STEPS for count in num_steps) / len(num_steps),
                    "mean_step": mean_step,
                    "p99_step": long_step,
                    "bound_by_mean_steps": 1.5 * first_token.p99 + 3 * mean_step,
                    "bound_by_p99_steps": 1.5 * first_token.p99 + 3 * long_step,
                    "job_tokens": totals[JOBS].num_generated,
                    "job_tokens_alone": alone.recorder.usage_by_tenant[JOBS].num_generated,
                    "device_share": run.device_seconds / seconds,
                }
            )
    targets = [
        Target(
            f"{row['machine']}, fair, by {steps} steps: p99 to the first token, s",
            row["p99"],
            Sense.AT_MOST,
            row[f"bound_by_{steps}_steps"],
            ".3f",
        )
        for row in rows
        if row["policy"] == "fair"
        for steps in ("mean", "p99")
    ]
    targets += [
        Target(
            f"{row['machine']}, fair: share of the time in which the device is busy",
            row["device_share"],
            Sense.AT_LEAST,
            0.97,
            ".1%",
        )
        for row in rows
        if row["policy"] == "fair"
    ]
    targets += [
        Target(
            f"{row['machine']}, fair: chats with their first token by the end of {MAX_STEPS} steps",
            row["in_time"],
            Sense.AT_LEAST,
            0.99,
            ".1%",
        )
        for row in rows
        if row["policy"] == "fair"
    ]
    return outcome(rows, targets)


def _chats(rate: float, count: int) -> list[Arrival]:
    stream = ArrivalStream(rate, Lengths(32, 256), Lengths(16, 128), tenant=CHATS)
    return [replace(arrival, at=arrival.at + FIRST_CHAT) for arrival in stream.arrivals(0, count)]


def _jobs(count: int) -> list[Arrival]:
    stream = ArrivalStream(1.0, Lengths(256, 2048), Lengths(4000, 4000), tenant=JOBS, process=ArrivalProcess.AT_ONCE)
    return list(stream.arrivals(0, count))


def _run(
    machine: Machine,
    policy: str,
    arrivals: Iterable[Arrival],
    seconds: float,
    step_seconds: list[float] | None = None,
    ends: list[float] | None = None,
) -> Simulation:
    """Durations of steps are added to `step_seconds`, and when they end to `ends`."""
    simulation = Simulation(Setup(machine, policy=policy), OpenLoop(arrivals))

    def note(_: Replica, done: StepCompletion) -> None:
        if step_seconds is not None:
            step_seconds.append(done.seconds)
        if ends is not None:
            ends.append(simulation.now)

    simulation.after_commit = note
    simulation.run(until=seconds)
    return simulation


def _first_token(simulation: Simulation) -> Percentiles:
    """Chats without a token by the end count with what they have waited."""
    waits = [
        (simulation.now if record.first_token_at is None else record.first_token_at) - record.arrival.at
        for record in simulation.recorder.records
        if record.arrival.tenant == CHATS
    ]
    percentiles = Percentiles.of(waits)
    assert percentiles is not None
    return percentiles


def _steps_to_first_token(simulation: Simulation, ends: Sequence[float]) -> list[int]:
    """How many steps end from a chat's arrival until its first token, that token's step included."""
    return [
        bisect_right(ends, simulation.now if record.first_token_at is None else record.first_token_at)
        - bisect_right(ends, record.arrival.at)
        for record in simulation.recorder.records
        if record.arrival.tenant == CHATS
    ]


def table(result: dict[str, Any]) -> Cells:
    """A row for each machine and policy."""
    columns = (
        *("machine", "policy", "chats alone, s, p50 / p99", "beside the jobs, s, p50 / p99"),
        "steps to the first token, p50 / p99",
        *("a step of the jobs, ms, mean / p99", "tokens of the jobs, relative to alone", "device busy"),
    )
    cells = [
        [
            row["machine"],
            row["policy"],
            f"{row['idle_p50']:.3f} / {row['idle_p99']:.3f}",
            f"{row['p50']:.3f} / {row['p99']:.3f}",
            f"{row['steps_p50']:.0f} / {row['steps_p99']:.0f}",
            f"{1000 * row['mean_step']:.1f} / {1000 * row['p99_step']:.1f}",
            f"{row['job_tokens'] / row['job_tokens_alone']:.1%}",
            f"{row['device_share']:.1%}",
        ]
        for row in result["rows"]
    ]
    return Cells(columns, cells)


FLOOD = Scenario("flood", "First tokens of chats beside a tenant that takes all slots and blocks", measure, table)
