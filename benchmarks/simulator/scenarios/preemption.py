"""KV memory for a quarter of the load: preemption by swap, by recompute, and by whichever costs less."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.plot import Chart, Series
from benchmarks.report import Cells, Sense
from benchmarks.simulator.arrivals import ClosedLoop
from benchmarks.simulator.driver import PreemptionMode, Setup
from benchmarks.simulator.figures import RunFigures, run_figures
from benchmarks.simulator.machine import Machine
from benchmarks.simulator.presets import CPU_SMOLLM, GPU_8B, SLOW_BUS
from benchmarks.simulator.scenarios.scenario import Scenario, Target, outcome
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.synthetic import ArrivalProcess, ArrivalStream, Lengths, Prefixes

CHOICES = {
    "swap": PreemptionMode.SWAP,
    "recompute": PreemptionMode.RECOMPUTE,
    "auto": PreemptionMode.AUTO,
}
MACHINES = (GPU_8B, SLOW_BUS, CPU_SMOLLM)
REGIMES = {
    "short prompts": ArrivalStream(1.0, Lengths(16, 64), Lengths(128, 512), process=ArrivalProcess.AT_ONCE),
    "long prompts": ArrivalStream(1.0, Lengths(1_024, 4_096), Lengths(256, 1_024), process=ArrivalProcess.AT_ONCE),
    "shared prefixes": ArrivalStream(
        1.0, Lengths(16, 256), Lengths(128, 512), process=ArrivalProcess.AT_ONCE, prefixes=Prefixes(4, 1_024)
    ),
}
NUM_CLIENTS = 64  # requests at a time
SHARE = 0.25  # of the blocks that the load would fill
NUM_REQUESTS = 300
NUM_SEEDS = 2
BUSES = (0.5, 1, 2, 4, 8, 16, 32, 64)  # GB/s


def measure(
    report: Callable[[str], None],
    num_requests: int = NUM_REQUESTS,
    num_seeds: int = NUM_SEEDS,
    machines: tuple[Machine, ...] = MACHINES,
    regimes: Mapping[str, ArrivalStream] = REGIMES,
    buses: tuple[float, ...] = BUSES,
) -> dict[str, Any]:
    """Modelled seconds for the same requests under each choice, in each regime on each machine, and over the bus."""
    rows = []
    for machine in machines:
        for regime, stream in regimes.items():
            report(f"{machine.name}, {regime}")
            rows.append(
                {"machine": machine.name, "regime": regime, **_compare(machine, stream, num_requests, num_seeds)}
            )
    over_bus = []
    for bus in buses:
        report(f"a bus of {bus:g} GB/s")
        machine = replace(GPU_8B, bytes_per_second=bus * 1e9)
        over_bus.append({"bus": bus, **_compare(machine, REGIMES["long prompts"], num_requests, 1)})
    worst = max(rows, key=lambda row: float(row["behind"]))
    auto = [row["choices"]["auto"] for row in rows]
    targets = [
        Target(
            f"by cost, most above the better of both ({worst['machine']}, {worst['regime']})",
            worst["behind"],
            Sense.AT_MOST,
            0.05,
            ".1%",
        ),
        Target("by cost, swapped", sum(choice["num_swapped"] for choice in auto), Sense.AT_LEAST, 20, ".0f"),
        Target("by cost, recomputed", sum(choice["num_recomputed"] for choice in auto), Sense.AT_LEAST, 20, ".0f"),
    ]
    return {**outcome(rows, targets), "over_bus": over_bus, "num_requests": num_requests * num_seeds}


def _compare(machine: Machine, stream: ArrivalStream, num_requests: int, num_seeds: int) -> dict[str, Any]:
    choices = {}
    for choice, mode in CHOICES.items():
        runs = [run(machine, stream, mode, num_requests, seed) for seed in range(num_seeds)]
        choices[choice] = {
            "seconds": sum(figures.seconds for figures in runs),
            "num_swapped": sum(figures.core.num_swapped for figures in runs),
            "num_recomputed": sum(figures.core.num_recomputed for figures in runs),
        }
    better = min(choices["swap"]["seconds"], choices["recompute"]["seconds"])
    return {"choices": choices, "behind": choices["auto"]["seconds"] / better - 1}


def run(machine: Machine, stream: ArrivalStream, mode: PreemptionMode, num_requests: int, seed: int) -> RunFigures:
    """One run on a machine whose blocks hold a quarter of what its clients would fill."""
    per_request = stream.prompt.mean + stream.output.mean
    prefixes = stream.prefixes
    shared = 0 if prefixes is None else prefixes.count * prefixes.num_tokens
    num_blocks = int(SHARE * (NUM_CLIENTS * per_request + shared) / machine.block_size)
    least = -(-(stream.prompt.high + stream.output.high + shared) // machine.block_size)
    small = replace(
        machine, num_blocks=max(num_blocks, least), num_host_blocks=4 * num_blocks, max_sequences=NUM_CLIENTS
    )
    traffic = ClosedLoop(stream.arrivals(seed, num_requests), NUM_CLIENTS)
    simulation = Simulation(Setup(small, preemption=mode), traffic, seed=seed)
    simulation.run()
    return run_figures(simulation)


def table(result: dict[str, Any]) -> Cells:
    """A row for each machine and regime: seconds under each choice, and the choices."""
    rows = []
    for row in result["rows"]:
        choices = row["choices"]
        seconds = [f"{choices[choice]['seconds']:,.1f}" for choice in CHOICES]
        counts = [f"{choices['auto'][count]:,}" for count in ("num_swapped", "num_recomputed")]
        rows.append([row["machine"], row["regime"], *seconds, f"{row['behind']:+.1%}", *counts])
    columns = (
        *("machine", "regime", "always swap, s", "always recompute, s", "by cost, s"),
        *("by cost, above the better", "by cost, swapped", "by cost, recomputed"),
    )
    return Cells(columns, rows, num_labels=2)


def charts(result: dict[str, Any]) -> list[Chart]:
    """Long prompts over the speed of the bus."""
    titles = {"swap": "always swap", "recompute": "always recompute", "auto": "by cost"}
    series = [
        Series(title, [(row["bus"], row["choices"][choice]["seconds"]) for row in result["over_bus"]])
        for choice, title in titles.items()
    ]
    return [Chart(f"Modelled seconds for the same requests, {GPU_8B.name}, long prompts", "bus, GB/s", series)]


PREEMPTION = Scenario("preemption", "Preemption with KV memory for a quarter of the load", measure, table, charts)
