"""The duration of a simulation itself, in processor time of its thread."""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from benchmarks.plot import Chart, Series
from benchmarks.report import Cells, Sense
from benchmarks.simulator.arrivals import OpenLoop
from benchmarks.simulator.driver import Setup
from benchmarks.simulator.gc_tuning import frozen_gc
from benchmarks.simulator.presets import GPU_8B
from benchmarks.simulator.scenarios.scenario import Scenario, Target, outcome
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.synthetic import ArrivalStream, Lengths

NUM_REQUESTS = (10_000, 100_000)
NUM_REPLICAS = (1, 10, 100, 1_000)
# Memory for the running sequences and some more: a thousand whole replicas would not fit in a small computer.
MACHINE = replace(GPU_8B, num_blocks=4_000, num_host_blocks=1_000)
RATE = 110.0  # requests a second for each replica, about four fifths of its capacity
_BOUNDS = {10_000: 30.0, 100_000: 600.0}  # seconds


def measure(
    report: Callable[[str], None],
    num_requests: tuple[int, ...] = NUM_REQUESTS,
    num_replicas: tuple[int, ...] = NUM_REPLICAS,
) -> dict[str, Any]:
    """Each number of requests over each number of replicas."""
    rows = []
    for requests in num_requests:
        for replicas in num_replicas:
            report(f"{requests:,} requests, {replicas:,} replicas")
            rows.append(_measure(requests, replicas))
    targets = [
        Target(
            f"{requests:,} requests, slowest of all numbers of replicas, s",
            max(row["took_seconds"] for row in rows if row["num_requests"] == requests),
            Sense.AT_MOST,
            bound,
            ".1f",
        )
        for requests, bound in _BOUNDS.items()
        if requests in num_requests
    ]
    return outcome(rows, targets)


def _measure(num_requests: int, num_replicas: int) -> dict[str, Any]:
    stream = ArrivalStream(RATE * num_replicas, Lengths(16, 512), Lengths(16, 256))
    with frozen_gc():
        began = perf_counter()
        simulation = Simulation(
            Setup(MACHINE, num_replicas, max_queued=1 << 30), OpenLoop(stream.arrivals(0, num_requests))
        )
        simulation.run()
        took = perf_counter() - began
    return {
        "num_requests": num_requests,
        "num_replicas": num_replicas,
        "took_seconds": took,
        "seconds": simulation.now,
        "num_steps": simulation.num_steps,
        "generated_tokens": simulation.recorder.num_generated,
    }


def table(result: dict[str, Any]) -> Cells:
    """A row for each case."""
    columns = ("requests", "replicas", "took, s", "modelled, s", "steps", "generated tokens", "of these a second")
    rows = [
        [
            *(f"{row['num_requests']:,}", f"{row['num_replicas']:,}", f"{row['took_seconds']:.1f}"),
            *(f"{row['seconds']:,.1f}", f"{row['num_steps']:,}", f"{row['generated_tokens']:,}"),
            f"{row['generated_tokens'] / row['took_seconds']:,.0f}",
        ]
        for row in result["rows"]
    ]
    return Cells(columns, rows, num_labels=0)


def charts(result: dict[str, Any]) -> list[Chart]:
    """The time it takes over the number of replicas."""
    rows = result["rows"]
    series = [
        Series(
            f"{requests:,} requests",
            [(r["num_replicas"], r["took_seconds"]) for r in rows if r["num_requests"] == requests],
        )
        for requests in dict.fromkeys(row["num_requests"] for row in rows)
    ]
    return [Chart("Seconds that a simulation takes", "replicas", series)]


SCALE = Scenario("scale", "How long a simulation takes", measure, table, charts)
