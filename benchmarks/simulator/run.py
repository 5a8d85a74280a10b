"""Simulates one load, recorded or synthetic, and prints its figures.

    python -m benchmarks.simulator.run [--recording FILE | --streams FILE] [--machine gpu-8b] [--policy fair] …

recorded.py and streams_file.py describe recordings and files of streams; without either, requests come from one tenant
at `--rate`. The same flags give the same figures on every machine.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from benchmarks.record import provenance, write_result
from benchmarks.report import Cells
from benchmarks.simulator.arrivals import Arrival, ClosedLoop, OpenLoop, merged
from benchmarks.simulator.driver import PreemptionMode, Setup
from benchmarks.simulator.figures import Percentiles, RunFigures, ServedTokens, run_figures
from benchmarks.simulator.machine import MachineError, machine_to_json, read_machine
from benchmarks.simulator.plan_checker import InvalidPlan, check_plans
from benchmarks.simulator.presets import MACHINES
from benchmarks.simulator.recorded import RecordingError, read_recording, write_recording
from benchmarks.simulator.simulation import Simulation, SimulationStalled
from benchmarks.simulator.streams_file import StreamsError, read_streams
from benchmarks.simulator.synthetic import ArrivalStream, Lengths
from benchmarks.simulator.timeline import draw_timeline
from scheduler_svc.core.policy import POLICIES


def arrivals_of(options: argparse.Namespace) -> Iterator[Arrival]:
    """The requests of the flags, in order."""
    if options.recording is not None:
        return islice(read_recording(options.recording), options.requests)
    if options.streams is not None:
        streams = read_streams(options.streams)
    else:
        streams = [ArrivalStream(options.rate, Lengths(*options.prompt), Lengths(*options.generate))]
    return islice(merged(*(stream.arrivals(options.seed) for stream in streams)), options.requests or 10_000)


def lengths(text: str) -> tuple[int, int]:
    """A flag's lengths, `16-512` or `64`."""
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def moments(text: str) -> tuple[float, float]:
    """A flag's span of time, `15-60`."""
    begin, _, end = text.partition("-")
    return float(begin), float(end)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = flags.add_mutually_exclusive_group()
    source.add_argument("--recording", type=Path, help="replay this file")
    source.add_argument("--streams", type=Path, help="synthetic requests of this file")
    flags.add_argument("--requests", type=int, help="how many at most; default 10000, of a recording all")
    flags.add_argument("--rate", type=float, default=100.0, help="requests a second; default 100")
    flags.add_argument("--prompt", type=lengths, default=(16, 512), help="prompt tokens; default 16-512")
    flags.add_argument("--generate", type=lengths, default=(16, 256), help="output tokens; default 16-256")
    flags.add_argument(
        "--clients", type=int, help="number of clients that each send one request after the other, instead of a rate"
    )
    flags.add_argument("--think", type=float, default=0.0, help="seconds that a client waits between; default 0")
    flags.add_argument("--machine", default="gpu-8b", help=f"{', '.join(MACHINES)}, or a JSON file; default gpu-8b")
    flags.add_argument("--replicas", type=int, default=1, help="default 1")
    flags.add_argument("--policy", default="fair", choices=POLICIES, help="default fair")
    flags.add_argument(
        "--ageing-seconds",
        type=float,
        default=10.0,
        help="waiting time that raises the priority by one class; default 10",
    )
    modes = [mode.value for mode in PreemptionMode]
    flags.add_argument("--preemption", default="auto", choices=modes, help="default auto")
    flags.add_argument("--max-queued", type=int, default=1 << 30, help="requests that may wait; default no bound")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--check", action="store_true", help="check each plan's reads and writes")
    flags.add_argument("--window", type=moments, help="count tokens served to tenants from 15 to 60 s: 15-60")
    flags.add_argument("--until", type=float, help="end after so many modelled seconds")
    flags.add_argument("--result", type=Path, help="JSON file to write")
    flags.add_argument("--plot", type=Path, help="SVG file to write")
    flags.add_argument("--record", type=Path, help="write the requests to this file, and simulate nothing")
    return flags


def class_table(figures: RunFigures) -> Cells:
    """A row for each priority of a run: p50 / p99 in seconds."""
    rows = [
        [str(c.priority), f"{c.num_requests:,}", *(_spread(spread) for spread in (c.queued, c.first_token, c.whole))]
        for c in figures.classes
    ]
    return Cells(("priority", "requests", "queued, s", "to first token, s", "to the end, s"), rows, num_labels=0)


def tenant_table(served: Mapping[str, int]) -> Cells:
    """A row for each tenant: tokens served, and its share of all."""
    total = sum(served.values()) or 1
    rows = [[tenant, f"{count:,}", f"{count / total:.1%}"] for tenant, count in served.items()]
    return Cells(("tenant", "tokens served", "of all"), rows)


def run_lines(figures: RunFigures) -> list[str]:
    """The other figures of a run, a line each."""
    core = figures.core
    looked_up = core.num_looked_up or 1
    failures = ", ".join(f"{count:,} {reason}" for reason, count in figures.failures.items()) or "none"
    return [
        f"{figures.num_finished:,} of {figures.num_requests:,} requests finished in {figures.seconds:,.1f} s; "
        f"failed: {failures}",
        f"{figures.generated_per_second:,.0f} tokens/s generated; devices computed {figures.device_share:.1%} of it",
        f"preemptions: {core.num_swapped:,} by swap, {core.num_recomputed:,} by recompute",
        f"prompt tokens found: {core.num_found_on_device / looked_up:.1%} on the device, "
        f"{core.num_found_on_host / looked_up:.1%} on the host",
    ]


def _spread(spread: Percentiles | None) -> str:
    return "–" if spread is None else f"{spread.p50:,.3f} / {spread.p99:,.3f}"


def main() -> None:
    options = parser().parse_args()
    try:
        if options.record is not None:
            print(f"{write_recording(options.record, arrivals_of(options)):,} requests", file=sys.stderr)
            return
        setup = Setup(
            read_machine(options.machine, MACHINES),
            options.replicas,
            options.policy,
            options.ageing_seconds,
            PreemptionMode(options.preemption),
            options.max_queued,
        )
        arrivals = arrivals_of(options)
        traffic = (
            OpenLoop(arrivals) if options.clients is None else ClosedLoop(arrivals, options.clients, options.think)
        )
        simulation = Simulation(setup, traffic, seed=options.seed)
        if options.check:
            check_plans(simulation)
        window = ServedTokens(simulation, *options.window) if options.window is not None else None
        simulation.run(options.until)
    except (MachineError, RecordingError, StreamsError, SimulationStalled, InvalidPlan) as error:
        sys.exit(f"simulator: {error}")
    figures = run_figures(simulation)
    class_table(figures).print(f"{setup.machine.name} × {setup.num_replicas}, {setup.policy}")
    if window is not None:
        tenant_table(window.by_tenant).print(f"Tenants, from {options.window[0]:g} to {options.window[1]:g} s")
    elif len(figures.tenants) > 1:
        tenant_table(figures.tenants).print("Tenants")
    print("\n".join(run_lines(figures)))
    if options.result is not None:
        described = {"machine_table": machine_to_json(setup.machine), "policy": setup.policy, **figures.to_json()}
        write_result(options.result, {**provenance(), **described})
    if options.plot is not None:
        options.plot.write_text(draw_timeline(figures.samples, setup))


if __name__ == "__main__":
    main()
