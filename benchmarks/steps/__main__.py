"""Measures what a step costs beside the forward pass (`make bench-steps`).

    python -m benchmarks.steps [--sequences 1,64,256,1024] [--forward-ms 10,0] [--steps 300] [--runs 5] [--output FILE]

Scheduler, gRPC and worker are real, only the model sleeps. For each number of running sequences and each length of a
forward pass, a scheduler (with a Redis) and a worker are started as processes, and this one is their gateway: it
submits the requests and reads every event. gRPC alone is measured beside them (exchange.py). All take turns, and
results are medians of the runs; report.py defines each figure.
"""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.processes import BenchmarkFailed, running
from benchmarks.record import RESULTS, provenance
from benchmarks.runner import failures_exit, in_turns, log, make_parser, median_of, publish
from benchmarks.steps.exchange import MESSAGE_BYTES, POLLING, ExchangeTimes, measure_exchange
from benchmarks.steps.gateway import decode_together
from benchmarks.steps.processes import ProcessEndpoints, running_scheduler, running_worker
from benchmarks.steps.report import (
    WARM_UP_STEPS,
    DeviceTimes,
    SchedulerTimes,
    StepFigures,
    exchange_lines,
    judge,
    steps_table,
    summarize_steps,
)
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
    parser = make_parser(__doc__, RESULT)
    parser.add_argument("--sequences", type=numbers, default=[1, 64, 256, 1024], help="default 1,64,256,1024")
    parser.add_argument("--forward-ms", type=numbers, default=[10.0, 0.0], help="default 10,0")
    parser.add_argument("--steps", type=int, default=300, help="measured steps of each case; default 300")
    parser.add_argument("--runs", type=int, default=5, help="runs of each case; default 5")
    options = parser.parse_args()
    if options.runs < 1 or options.steps < 1:
        parser.error("--runs and --steps are at least 1")
    sizes = [(int(number), forward_ms) for forward_ms in options.forward_ms for number in options.sequences]
    exchanges: dict[str, list[ExchangeTimes]] = {polling: [] for polling in POLLING}
    cases: dict[tuple[int, float], list[StepFigures]] = {size: [] for size in sizes}
    with failures_exit("steps"):
        keys: list[str | tuple[int, float]] = [*exchanges, *sizes]
        for run, key in in_turns(keys, options.runs):
            if isinstance(key, str):
                log(f"run {run + 1}, gRPC alone, {key}")
                exchanges[key].append(measure_exchange(key, options.steps))
            else:
                log(f"run {run + 1}, {key[0]} sequences, {key[1]:g} ms")
                cases[key].append(measure(*key, options.steps))
    medians = [median_of(figures) for figures in cases.values()]
    result: dict[str, Any] = {
        **provenance("grpcio", "protobuf", "uvloop"),
        "num_steps": options.steps,
        "num_runs": options.runs,
        "cases": [asdict(case) for case in medians],
        "exchange_bytes": MESSAGE_BYTES,
        "exchanges": {polling: asdict(median_of(times)) for polling, times in exchanges.items()},
        "targets": judge(medians),
    }
    publish(result, options.output or RESULT, {"Steps, ms": steps_table(result)})
    print(exchange_lines(result))


if __name__ == "__main__":
    main()
