"""One tenant fills all slots and blocks with long jobs; another one sends 500 chats: their time to the first token."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from benchmarks.report import Cells, Sense
from benchmarks.simulator.arrivals import Arrival, OpenLoop, merged
from benchmarks.simulator.device import StepCompletion
from benchmarks.simulator.driver import Replica, Setup
from benchmarks.simulator.figures import Percentiles
from benchmarks.simulator.machine import Machine
from benchmarks.simulator.presets import CPU_SMOLLM, GPU_8B
from benchmarks.simulator.request_record import RequestRecord
from benchmarks.simulator.scenarios.scenario import Scenario, Target, outcome
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.synthetic import ArrivalProcess, ArrivalStream, Lengths
from quire_client.bench.latency import percentile

POLICIES = ("fcfs", "fair")
CASES = ((GPU_8B, 5.0, 800), (CPU_SMOLLM, 0.6, 200))
"""Machine, chats a second, and jobs, all of which arrive at the start, and more than are computed until the end."""
NUM_CHATS = 500
FIRST_CHAT = 10.0  # seconds after the jobs
NUM_STEPS = 3  # until a first token: one until a slot is free, two in flight
CHATS, JOBS = "chats", "jobs"


@dataclass
class Steps:
    """The steps of a run: when each ended, and how long it was, in seconds."""

    ends: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def num_met(self, record: RequestRecord, now: float) -> int:
        """How many steps ended from a request's arrival until its first token, that token's included."""
        first_token_at = now if record.first_token_at is None else record.first_token_at
        return bisect_right(self.ends, first_token_at) - bisect_right(self.ends, record.arrival.at)


def measure(
    report: Callable[[str], None], cases: Sequence[tuple[Machine, float, int]] = CASES, num_chats: int = NUM_CHATS
) -> dict[str, Any]:
    """Seconds from a chat's arrival to its first token, alone and beside the jobs, and what the jobs lose."""
    rows: list[dict[str, Any]] = []
    for machine, rate, num_jobs in cases:
        seconds = FIRST_CHAT + num_chats / rate
        jobs, chats = _jobs(num_jobs), _chats(rate, num_chats)
        report(f"{machine.name}: chats alone, jobs alone")
        idle, _ = _run(machine, "fair", chats, seconds)
        alone, flood_steps = _run(machine, "fair", jobs, seconds)
        mean_flood_step = mean(flood_steps.seconds)
        first_token = _percentiles(_waits(idle))
        for policy in POLICIES:
            report(f"{machine.name}, {policy}: chats beside jobs")
            run, steps = _run(machine, policy, merged(chats, jobs), seconds)
            beside = _percentiles(_waits(run))
            num_steps = _percentiles([steps.num_met(record, run.now) for record in _records(run)])
            totals = run.recorder.usage_by_tenant
            rows.append(
                {
                    "machine": machine.name,
                    "policy": policy,
                    "idle_p50": first_token.p50,
                    "idle_p99": first_token.p99,
                    "p50": beside.p50,
                    "p99": beside.p99,
                    "steps_p50": num_steps.p50,
                    "steps_p99": num_steps.p99,
                    "mean_step": mean(steps.seconds),
                    "p99_step": percentile(sorted(steps.seconds), 99),
                    "mean_flood_step": mean_flood_step,
                    "bound": 1.5 * first_token.p99 + NUM_STEPS * mean_flood_step,
                    "job_tokens": totals[JOBS].num_generated,
                    "job_tokens_alone": alone.recorder.usage_by_tenant[JOBS].num_generated,
                    "device_share": run.device_seconds / seconds,
                }
            )
    targets = []
    for row in rows:
        if row["policy"] != "fair":
            continue
        targets += [
            Target(
                f"{row['machine']}, fair: p99 to the first token, s",
                row["p99"],
                Sense.AT_MOST,
                row["bound"],
                ".3f",
            ),
            Target(
                f"{row['machine']}, fair: share of the time in which the device is busy",
                row["device_share"],
                Sense.AT_LEAST,
                0.97,
                ".1%",
            ),
        ]
    return outcome(rows, targets)


def _chats(rate: float, count: int) -> list[Arrival]:
    stream = ArrivalStream(rate, Lengths(32, 256), Lengths(16, 128), tenant=CHATS)
    return [replace(arrival, at=arrival.at + FIRST_CHAT) for arrival in stream.arrivals(0, count)]


def _jobs(count: int) -> list[Arrival]:
    stream = ArrivalStream(
        1.0,
        Lengths(256, 2048),
        Lengths(1000, 4000),
        tenant=JOBS,
        process=ArrivalProcess.AT_ONCE,
        priorities=((0, 0.8), (-1, 0.2)),
        sequences=((1, 0.8), (4, 0.2)),
        max_tokens=4000,
    )
    return list(stream.arrivals(0, count))


def _run(machine: Machine, policy: str, arrivals: Iterable[Arrival], seconds: float) -> tuple[Simulation, Steps]:
    simulation, steps = Simulation(Setup(machine, policy=policy), OpenLoop(arrivals)), Steps()

    def note(_: Replica, done: StepCompletion) -> None:
        steps.ends.append(simulation.now)
        steps.seconds.append(done.seconds)

    simulation.after_commit = note
    simulation.run(until=seconds)
    return simulation, steps


def _records(simulation: Simulation) -> list[RequestRecord]:
    """Of the chats."""
    return [record for record in simulation.recorder.records if record.arrival.tenant == CHATS]


def _waits(simulation: Simulation) -> list[float]:
    """Seconds to the first token of each chat; those without a token by the end count with what they have waited."""
    return [
        (simulation.now if record.first_token_at is None else record.first_token_at) - record.arrival.at
        for record in _records(simulation)
    ]


def _percentiles(values: Sequence[float]) -> Percentiles:
    percentiles = Percentiles.of(values)
    assert percentiles is not None
    return percentiles


def table(result: dict[str, Any]) -> Cells:
    """A row for each machine and policy."""
    columns = (
        *("machine", "policy", "chats alone, s, p50 / p99", "beside the jobs, s, p50 / p99"),
        "steps to the first token, p50 / p99",
        *("a step, ms, mean / p99", "tokens of the jobs, relative to alone", "device busy"),
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
