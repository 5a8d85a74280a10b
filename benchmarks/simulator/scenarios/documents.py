"""Chats and documents of one tenant, as many as a machine serves, or more: when their first tokens come."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from benchmarks.report import Cells, Sense
from benchmarks.simulator.arrivals import ClosedLoop, OpenLoop, Traffic
from benchmarks.simulator.driver import Setup
from benchmarks.simulator.figures import Percentiles, run_figures
from benchmarks.simulator.machine import Machine
from benchmarks.simulator.presets import CPU_SMOLLM, GPU_8B
from benchmarks.simulator.scenarios.scenario import Scenario, Target, outcome
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.synthetic import ArrivalStream, Lengths

CLIENTS = ((CPU_SMOLLM, 64), (GPU_8B, 320))
"""Machines with a number of clients that send one request after the other: more than are served at once."""
RATES = ((CPU_SMOLLM, 3.5), (GPU_8B, 52.0))
"""Machines with a number of requests a second, at random times: nearly as many as are served."""
POLICIES = ("fcfs", "fair")
PROMPTS, OUTPUTS = Lengths(16, 2048), Lengths(16, 256)
BOUNDS = (256, 1024)  # tokens: prompts below the first are chats, from the second on documents
NUM_REQUESTS = 3_000


def measure(report: Callable[[str], None], num_requests: int = NUM_REQUESTS) -> dict[str, Any]:
    """Times to the first token under each load and policy, by length of the prompt."""
    loads: list[tuple[Machine, str, Callable[[], Traffic], int]] = [
        *((machine, f"{count} clients", partial(_clients, count, num_requests), count) for machine, count in CLIENTS),
        *((machine, f"{rate:g} requests/s", partial(_arrivals, rate, num_requests), 0) for machine, rate in RATES),
    ]
    rows: list[dict[str, Any]] = []
    targets: list[Target] = []
    for (machine, load, traffic, num_at_once), policy in product(loads, POLICIES):
        report(f"{machine.name}, {load}, {policy}, {num_requests:,} requests")
        simulation = Simulation(Setup(machine, policy=policy), traffic())
        simulation.run()
        times: list[list[float]] = [[], [], []]
        for record in simulation.recorder.records[num_at_once:]:  # the first ones come all at once
            assert record.first_token_at is not None
            times[sum(record.num_prompt >= bound for bound in BOUNDS)].append(record.first_token_at - record.arrival.at)
        chats, others, documents = (Percentiles.of(each) for each in times)
        assert chats is not None
        assert others is not None
        assert documents is not None
        num_generated = sum(record.num_generated for record in simulation.recorder.records)
        rows.append(
            {
                "machine": machine.name,
                "load": load,
                "policy": policy,
                "tokens_per_second": num_generated / run_figures(simulation).seconds,
                "first_token": [{"p50": each.p50, "p99": each.p99} for each in (chats, others, documents)],
            }
        )
        if num_at_once:
            name = f"{machine.name}, {policy}: p50 to the first token, documents to chats"
            targets.append(Target(name, documents.p50 / chats.p50, Sense.AT_MOST, 10.0, ".1f"))
    return outcome(rows, targets)


def _clients(count: int, num_requests: int) -> Traffic:
    return ClosedLoop(ArrivalStream(1.0, PROMPTS, OUTPUTS).arrivals(0, num_requests), count)


def _arrivals(rate: float, num_requests: int) -> Traffic:
    return OpenLoop(ArrivalStream(rate, PROMPTS, OUTPUTS).arrivals(0, num_requests))


def table(result: dict[str, Any]) -> Cells:
    """A row for each load and policy."""
    rows = [
        [
            row["machine"],
            row["load"],
            row["policy"],
            f"{row['tokens_per_second']:,.0f}",
            *(f"{each['p50']:,.2f} / {each['p99']:,.2f}" for each in row["first_token"]),
        ]
        for row in result["rows"]
    ]
    low, high = BOUNDS
    kinds = (f"chats, below {low:,} tokens", f"{low:,} to {high - 1:,} tokens", f"documents, from {high:,} tokens")
    first_tokens = (f"first token of {kind}, s, p50 / p99" for kind in kinds)
    return Cells(("machine", "load", "policy", "output tokens/s", *first_tokens), rows, num_labels=3)


DOCUMENTS = Scenario("documents", "Chats beside documents", measure, table)
