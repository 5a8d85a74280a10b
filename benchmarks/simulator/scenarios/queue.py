"""The cost of schedule and commit at 1,024 running sequences, over the length of the queue.

In processor time of the thread, so other load on the machine does not count.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from time import thread_time
from typing import Any

from benchmarks.plot import Chart, Series
from benchmarks.report import Cells, Sense
from benchmarks.simulator.arrivals import Arrival
from benchmarks.simulator.device import Device, StepCompletion
from benchmarks.simulator.driver import MAX_STEPS_IN_FLIGHT, CoreDriver, Setup, SimulatedStep, outcome_of
from benchmarks.simulator.gc_tuning import frozen_gc
from benchmarks.simulator.machine import Machine
from benchmarks.simulator.presets import GPU_8B
from benchmarks.simulator.prompts import Tokens
from benchmarks.simulator.request_record import RequestRecord, TenantUsage
from benchmarks.simulator.scenarios.scenario import Scenario, Target, outcome
from benchmarks.simulator.synthetic import ArrivalStream, Lengths
from benchmarks.steps.report import DurationPercentiles
from scheduler_svc.core.events import TokensEvent

POLICIES = ("fcfs", "priority", "fair")
QUEUED = (0, 100, 1_000, 10_000, 30_000, 100_000)
NUM_RUNNING = 1_024
NUM_TENANTS = 1_000
WARM_UP_STEPS, NUM_STEPS = 40, 200


@dataclass(frozen=True, slots=True)
class QueueCase:
    """Steps at a length of the queue. Milliseconds; `num_ended` sequences end in a step on average."""

    policy: str
    num_queued: int
    schedule: DurationPercentiles
    commit: DurationPercentiles
    both: DurationPercentiles
    num_ended: float


def measure(
    report: Callable[[str], None],
    queued: tuple[int, ...] = QUEUED,
    num_running: int = NUM_RUNNING,
    num_steps: int = NUM_STEPS,
) -> dict[str, Any]:
    """Each policy over the lengths of the queue."""
    cases = []
    for policy in POLICIES:
        for num_queued in queued:
            report(f"{policy}, {num_queued:,} queued")
            cases.append(measure_steps(policy, num_queued, num_running, num_steps))
    targets = []
    for policy in POLICIES:
        shortest, longest = [
            case for case in cases if case.policy == policy and case.num_queued in (queued[0], queued[-1])
        ]
        p50 = longest.both.p50
        targets += [
            Target(
                f"{policy}: schedule + commit, {num_running:,} running, {queued[-1]:,} queued, p50, ms",
                p50,
                Sense.AT_MOST,
                5,
                ".2f",
            ),
            Target(
                f"{policy}: the same, relative to an empty queue", p50 / shortest.both.p50, Sense.AT_MOST, 1.5, ".2f"
            ),
        ]
    return {**outcome([asdict(case) for case in cases], targets), "num_running": num_running, "num_steps": num_steps}


def measure_steps(policy: str, num_queued: int, num_running: int, num_steps: int) -> QueueCase:
    """Keeps `num_running` sequences decoding and `num_queued` waiting; each end admits a waiting one."""
    machine = replace(
        GPU_8B, num_blocks=32 * num_running, num_host_blocks=0, max_sequences=num_running, max_step_tokens=8_192
    )
    line = _QueueRun(machine, policy)
    for _ in range(num_running + num_queued):
        line.submit()
    with frozen_gc():
        for _ in range(MAX_STEPS_IN_FLIGHT - 1 + WARM_UP_STEPS + num_steps):
            line.step()
    schedule, commit = line.schedule_seconds[-num_steps:], line.commit_seconds[-num_steps:]
    both = [sum(seconds) for seconds in zip(schedule, commit, strict=True)]
    num_ended = line.num_ended / len(line.commit_seconds)
    return QueueCase(
        policy,
        num_queued,
        DurationPercentiles.of(schedule),
        DurationPercentiles.of(commit),
        DurationPercentiles.of(both),
        num_ended,
    )


class _QueueRun:
    """One replica, stepped by hand. Each end brings a new request."""

    def __init__(self, machine: Machine, policy: str) -> None:
        self._tokens = Tokens(seed=0)
        self._driver = CoreDriver(Setup(machine, policy=policy, max_queued=1 << 30), self._tokens)
        self._device = Device(machine)
        self._arrivals = _arrivals()
        self._flights: list[tuple[SimulatedStep, StepCompletion]] = []
        self._num_submitted = 0
        self._now = 0.0
        self.schedule_seconds: list[float] = []
        self.commit_seconds: list[float] = []
        self.num_ended = 0

    def submit(self) -> None:
        arrival, number = next(self._arrivals), self._num_submitted
        self._num_submitted += 1
        prompt = self._tokens.prompt(arrival, number)
        record = RequestRecord(number, arrival, self._tokens.script(arrival, len(prompt)), len(prompt), TenantUsage())
        refusal = self._driver.submit(record, prompt, self._now)
        assert refusal is None, refusal

    def step(self) -> None:
        """Plans a step, and commits the oldest one where the pipeline is full."""
        core, replica = self._driver.core, self._driver.replicas[0]
        began = thread_time()
        plan = core.schedule(replica, self._now)
        self.schedule_seconds.append(thread_time() - began)
        assert plan is not None, "there is nothing to do"
        step = self._driver.read(plan)
        self._flights.append((step, self._device.run(step.plan.step_id, step.work, self._now)))
        if len(self._flights) < MAX_STEPS_IN_FLIGHT:
            return
        step, done = self._flights.pop(0)
        self._now, outcome = done.at, outcome_of(step, done)
        began = thread_time()
        events = core.commit(replica, outcome, self._now)
        self.commit_seconds.append(thread_time() - began)
        for event in events:
            if isinstance(event, TokensEvent) and event.end is not None:
                self.num_ended += 1
                self.submit()


def _arrivals() -> Iterator[Arrival]:
    """Requests of many tenants and four priorities, one after the other; their outputs end at different steps."""
    streams = [
        ArrivalStream(
            1.0,
            Lengths(16, 16),
            Lengths(20, 400),
            tenant=f"tenant {number}",
            priorities=tuple((p, 1.0) for p in range(4)),
        )
        for number in range(NUM_TENANTS)
    ]
    endless = [stream.arrivals(seed=0) for stream in streams]
    while True:
        for arrivals in endless:
            yield next(arrivals)


def table(result: dict[str, Any]) -> Cells:
    """A row for each policy and length; durations are p50 / p99 in milliseconds."""
    rows = []
    for row in result["rows"]:
        spreads = [f"{row[name]['p50']:.2f} / {row[name]['p99']:.2f}" for name in ("schedule", "commit", "both")]
        rows.append([row["policy"], f"{row['num_queued']:,}", *spreads, f"{row['num_ended']:.1f}"])
    columns = ("policy", "queued", "schedule, ms", "commit, ms", "both, ms", "ended and admitted per step")
    return Cells(columns, rows)


def charts(result: dict[str, Any]) -> list[Chart]:
    """Both over the length of the queue."""
    rows = [row for row in result["rows"] if row["num_queued"]]
    series = [
        Series(policy, [(row["num_queued"], row["both"]["p50"]) for row in rows if row["policy"] == policy])
        for policy in dict.fromkeys(row["policy"] for row in rows)
    ]
    title = f"schedule + commit, p50, ms, at {result['num_running']:,} running"
    return [Chart(title, "requests that wait", series)]


QUEUE = Scenario("queue", "What a step costs over the length of the queue", measure, table, charts)
