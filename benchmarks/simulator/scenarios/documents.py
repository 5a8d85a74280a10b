"""Chats and documents together, from more clients than a machine serves at once: when their first tokens come."""

from collections.abc import Callable
from typing import Any

from benchmarks.report import Cells, Sense
from benchmarks.simulator.arrivals import ClosedLoop
from benchmarks.simulator.driver import Setup
from benchmarks.simulator.figures import Percentiles, run_figures
from benchmarks.simulator.presets import CPU_SMOLLM, GPU_8B
from benchmarks.simulator.scenarios.scenario import Scenario, Target, outcome
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.synthetic import ArrivalStream, Lengths

MACHINES = ((CPU_SMOLLM, 64), (GPU_8B, 320))  # each with its number of clients, which send one request at a time
PROMPTS, OUTPUTS = Lengths(16, 2048), Lengths(16, 256)
BOUNDS = (256, 1024)  # tokens: prompts below the first are chats, from the second on documents
NUM_REQUESTS = 3_000


def measure(report: Callable[[str], None], num_requests: int = NUM_REQUESTS) -> dict[str, Any]:
    """Times to the first token on each machine, by length of the prompt."""
    rows: list[dict[str, Any]] = []
    targets: list[Target] = []
    for machine, num_clients in MACHINES:
        report(f"{machine.name}, {num_requests:,} requests")
        arrivals = ArrivalStream(1.0, PROMPTS, OUTPUTS).arrivals(0, num_requests)
        simulation = Simulation(Setup(machine), ClosedLoop(arrivals, num_clients))
        simulation.run()
        times: list[list[float]] = [[], [], []]
        for record in simulation.recorder.records[num_clients:]:  # the first ones come all at once
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
                "num_clients": num_clients,
                "tokens_per_second": num_generated / run_figures(simulation).seconds,
                "first_token": [{"p50": each.p50, "p99": each.p99} for each in (chats, others, documents)],
            }
        )
        name = f"{machine.name}: p50 to the first token, documents to chats"
        targets.append(Target(name, documents.p50 / chats.p50, Sense.AT_MOST, 10.0, ".1f"))
    return outcome(rows, targets)


def table(result: dict[str, Any]) -> Cells:
    """A row for each machine."""
    rows = [
        [
            row["machine"],
            f"{row['num_clients']:,}",
            f"{row['tokens_per_second']:,.0f}",
            *(f"{each['p50']:,.2f} / {each['p99']:,.2f}" for each in row["first_token"]),
        ]
        for row in result["rows"]
    ]
    low, high = BOUNDS
    kinds = (f"chats, below {low:,} tokens", f"{low:,} to {high - 1:,} tokens", f"documents, from {high:,} tokens")
    first_tokens = (f"first token of {kind}, s, p50 / p99" for kind in kinds)
    return Cells(("machine", "clients", "output tokens/s", *first_tokens), rows)


DOCUMENTS = Scenario("documents", "Chats beside documents", measure, table)
