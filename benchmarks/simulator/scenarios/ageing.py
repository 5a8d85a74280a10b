"""100,000 requests of four priorities, more than the machine can serve: waiting times, and overtaking."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from benchmarks.report import Cells, Sense
from benchmarks.simulator.arrivals import OpenLoop, merged
from benchmarks.simulator.driver import Setup
from benchmarks.simulator.figures import run_figures
from benchmarks.simulator.presets import GPU_8B
from benchmarks.simulator.request_record import RequestRecord
from benchmarks.simulator.scenarios.scenario import Scenario, Target, outcome
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.synthetic import ArrivalStream, Lengths
from scheduler_svc.core.request import FIRST_TOKEN_FACTOR

POLICIES = ("fcfs", "priority", "fair")
NUM_REQUESTS = 100_000
AGEING_SECONDS = 30.0
PRIORITIES = ((0, 0.4), (1, 0.3), (2, 0.2), (3, 0.1))
NUM_TENANTS = 10
RATE = 300.0  # requests a second, of all tenants; about 240 are served


def measure(
    report: Callable[[str], None], num_requests: int = NUM_REQUESTS, ageing_seconds: float = AGEING_SECONDS
) -> dict[str, Any]:
    """Waiting by priority under each policy, and how close the ageing bound was."""
    rows = []
    for policy in POLICIES:
        report(f"{policy}, {num_requests:,} requests")
        streams = [
            ArrivalStream(
                RATE / NUM_TENANTS, Lengths(16, 256), Lengths(16, 128), tenant=f"tenant {number}", priorities=PRIORITIES
            )
            for number in range(NUM_TENANTS)
        ]
        arrivals = merged(*(stream.arrivals(0, num_requests // NUM_TENANTS) for stream in streams))
        setup = Setup(GPU_8B, policy=policy, ageing_seconds=ageing_seconds, max_queued=num_requests)
        simulation = Simulation(setup, OpenLoop(arrivals))
        simulation.run()
        records = simulation.recorder.records
        figures = run_figures(simulation)
        rows.append(
            {
                "policy": policy,
                "num_requests": len(records),
                "seconds": figures.seconds,
                "most_waiting": max(sample.num_waiting for sample in figures.samples),
                "classes": figures.to_json()["classes"],
                "beyond_bound": max(0.0, worst_overtaking(records, ageing_seconds, is_fair=policy == "fair")),
            }
        )
    targets = [
        Target(
            f"{row['policy']}: overtaken beyond the bound, most, s",
            row["beyond_bound"],
            Sense.AT_MOST,
            0.0,
            ".3f",
        )
        for row in rows
    ]
    return {**outcome(rows, targets), "ageing_seconds": ageing_seconds}


def worst_overtaking(records: Sequence[RequestRecord], ageing_seconds: float, *, is_fair: bool = True) -> float:
    """The most, in seconds, by which a request that was admitted before another one came later than it may.

    It may come `ageing_seconds` later for each class that it is above the other one. `fair` orders only those of a
    tenant so, and a shorter prompt may also come later until the other one's first token is due. The bound holds where
    nothing is above 0. Of those that were admitted to the same step none was before another.
    """
    latest: dict[str, dict[int, float]] = {}  # arrival of those of earlier steps, by tenant and priority
    worst = -math.inf
    admitted = sorted((record for record in records if record.admitted_at is not None), key=_admitted_at)
    for _, step in groupby(admitted, key=_admitted_at):
        together = list(step)
        for record in together:
            arrival, due = record.arrival, record.arrival.at
            if is_fair:
                due += FIRST_TOKEN_FACTOR * record.prompt_seconds
            for priority, at in latest.get(arrival.tenant if is_fair else "", {}).items():
                worst = max(worst, at - due - max(0, priority - arrival.priority) * ageing_seconds)
        for arrival in (record.arrival for record in together):
            of_tenant = latest.setdefault(arrival.tenant if is_fair else "", {})
            of_tenant[arrival.priority] = max(of_tenant.get(arrival.priority, -math.inf), arrival.at)
    return worst


def _admitted_at(record: RequestRecord) -> float:
    return record.admitted_at or 0.0


def table(result: dict[str, Any]) -> Cells:
    """A row for each policy: how long each priority waits."""
    rows = []
    for row in result["rows"]:
        waits = [f"{c['queued']['p50']:,.1f} / {c['queued']['p99']:,.1f}" for c in row["classes"]]
        rows.append(
            [
                row["policy"],
                f"{row['num_requests']:,}",
                f"{row['most_waiting']:,}",
                *waits,
                f"{row['beyond_bound']:.1f}",
            ]
        )
    priorities = [c["priority"] for c in result["rows"][0]["classes"]]
    columns = (
        *("policy", "requests", "most waiting"),
        *(f"wait at priority {priority}, s, p50 / p99" for priority in priorities),
        "overtaken beyond the bound, s",
    )
    return Cells(columns, rows)


AGEING = Scenario("ageing", "Waiting by priority, with ageing", measure, table)
