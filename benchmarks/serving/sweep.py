"""Throughput and latency over concurrency, for the plot in docs/performance.md.

    [VLLM_VENV=ENVIRONMENT] python -m benchmarks.serving.sweep [--concurrency 1,2,…] [--systems quire,…] [--output FILE]

Each system is started once, and sent the mix at one concurrency after the other: three requests for each place, at
least eight, none of which it has seen before.
"""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes import BenchmarkFailed
from benchmarks.record import RESULTS, provenance, write_result
from benchmarks.serving.loads import sweep_loads
from benchmarks.serving.measure import run_system
from benchmarks.serving.prepare import MIX, end_on_signals, make_systems, prepare_model, report
from benchmarks.serving.report import sweep_table
from quire_client.bench.mix import read_mix
from quire_client.bench.targets import TargetError
from svc_common.models import ModelNotFound

RESULT = RESULTS / "sweep.json"


def main() -> None:
    """Reads flags, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64", help="default 1,2,4,8,16,32,64")
    parser.add_argument("--systems", help="which, of quire, vllm and continuous_batching; default all that are here")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"file for the result; default {RESULT.name}")
    options = parser.parse_args()
    concurrencies = [int(number) for number in options.concurrency.split(",")]
    end_on_signals()
    points: dict[str, Any] = {}
    try:
        model = prepare_model()
        loads = sweep_loads(read_mix(MIX), concurrencies)
        for system in make_systems(model, options.systems.split(",") if options.systems else None):
            outcomes = run_system(system, loads, report)
            reached = [{"concurrency": load.concurrency, **asdict(outcomes[load.name].figures)} for load in loads]
            points[system.name] = {"title": system.title, "points": reached}
    except (BenchmarkFailed, ModelNotFound, TargetError, httpx.HTTPError) as error:
        sys.exit(f"sweep: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    result = {**provenance("torch", "transformers"), "model": model.name, "systems": points}
    sweep_table(result).print(f"{model.name}, bfloat16: output tokens/s, and time to first token p50")
    write_result(options.output, result)
    print(f"written to {os.path.relpath(options.output)}", file=sys.stderr)


if __name__ == "__main__":
    main()
