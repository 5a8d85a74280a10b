"""Measures what a step costs beside the forward pass: scheduler, gRPC and worker are real, only the model sleeps.

    python -m benchmarks.steps [--sequences 1,64,256,1024] [--forward-ms 10,0] [--steps 300] [--runs 5] [--output FILE]

For each number of running sequences and each length of a forward pass, a scheduler (with a Redis) and a worker are
started as processes of their own, and this one is their gateway: it submits the requests and reads every event. Beside
them stands what gRPC takes by itself (exchange.py). All take turns, and what is told are medians of the runs. What each
figure means is said in figures.py.
"""

import argparse
import asyncio
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.processes import BenchmarkFailed, running
from benchmarks.record import RESULTS, provenance, write_result
from benchmarks.steps.exchange import MESSAGE_BYTES, POLLING, ExchangeTimes, measure_exchange, median_exchange
from benchmarks.steps.figures import (
    WARM_UP_STEPS,
    DeviceTimes,
    SchedulerTimes,
    StepFigures,
    judge,
    median_of,
    summarize_steps,
    to_json,
)
from benchmarks.steps.gateway import decode_together
from benchmarks.steps.processes import ProcessEndpoints, running_scheduler, running_worker
from benchmarks.steps.report import exchange_lines, steps_table
from svc_common.supervisor.addresses import free_port
from svc_common.supervisor.embedded_redis import EmbeddedRedis

RESULT = RESULTS / "steps.json"
TIMEOUT = 120.0


def measure(num_sequences: int, forward_ms: float, num_steps: int) -> StepFigures:
    """One case, in processes of its own. Raises BenchmarkFailed."""
    with TemporaryDirectory(prefix="quire-steps-") as folder, ExitStack() as stack:
        endpoints = ProcessEndpoints.choose(Path(folder))
        redis = EmbeddedRedis.prepare(Path(folder), free_port())
        stack.enter_context(running("Redis", redis.command))
        stack.enter_context(running_scheduler(endpoints, redis.url))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                decode_together(
                    endpoints.scheduler,
                    num_sequences,
                    WARM_UP_STEPS + num_steps + 8,
                    lambda: stack.enter_context(running_worker(endpoints, num_sequences, forward_ms / 1e3)),
                    TIMEOUT,
                )
            )
        stack.close()  # ends the processes, which write their times
        planned = [SchedulerTimes(**step) for step in json.loads(endpoints.scheduler_times.read_bytes())["steps"]]
        ran = [DeviceTimes(*step) for step in json.loads(endpoints.worker_times.read_bytes())]
    try:
        return summarize_steps(planned, ran, num_sequences, forward_ms, num_steps)
    except ValueError as error:
        raise BenchmarkFailed(str(error)) from error


def numbers(text: str) -> list[float]:
    """A flag's numbers, separated by commas."""
    return [float(number) for number in text.split(",")]


def main() -> None:
    """Reads flags, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=numbers, default=[1, 64, 256, 1024], help="default 1,64,256,1024")
    parser.add_argument("--forward-ms", type=numbers, default=[10.0, 0.0], help="default 10,0")
    parser.add_argument("--steps", type=int, default=300, help="steps that count in each case; default 300")
    parser.add_argument("--runs", type=int, default=5, help="runs of each case; default 5")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"file for the result; default {RESULT.name}")
    options = parser.parse_args()
    if options.runs < 1 or options.steps < 1:
        parser.error("--runs and --steps are at least 1")
    runs: dict[tuple[int, float], list[StepFigures]] = {
        (int(num_sequences), forward_ms): [] for forward_ms in options.forward_ms for num_sequences in options.sequences
    }
    exchanges: dict[str, list[ExchangeTimes]] = {polling: [] for polling in POLLING}
    try:
        for number in range(options.runs):
            for polling, measured in exchanges.items():
                print(f"run {number + 1}, gRPC alone, {polling}", file=sys.stderr, flush=True)
                measured.append(measure_exchange(polling, options.steps))
            for (num_sequences, forward_ms), figures in runs.items():
                text = f"run {number + 1}, {num_sequences} sequences, {forward_ms:g} ms"
                print(text, file=sys.stderr, flush=True)
                figures.append(measure(num_sequences, forward_ms, options.steps))
    except BenchmarkFailed as error:
        sys.exit(f"steps: {error}")
    cases = [median_of(figures) for figures in runs.values()]
    result: dict[str, Any] = {
        **provenance("grpcio", "protobuf", "uvloop"),
        "num_steps": options.steps,
        "num_runs": options.runs,
        "cases": [to_json(case) for case in cases],
        "exchange_bytes": MESSAGE_BYTES,
        "exchanges": {polling: asdict(median_exchange(measured)) for polling, measured in exchanges.items()},
        "targets": judge(cases),
    }
    steps_table(result).print("Steps, ms")
    print(exchange_lines(result))
    write_result(options.output, result)
    print(f"written to {os.path.relpath(options.output)}", file=sys.stderr)


if __name__ == "__main__":
    main()
