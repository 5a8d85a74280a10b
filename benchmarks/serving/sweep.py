"""Throughput and latency over concurrency, for the plot in docs/performance.md (`make bench-sweep`).

    [VLLM_VENV=ENVIRONMENT] python -m benchmarks.serving.sweep [--concurrency 1,2,…] [--systems quire,…] [--output FILE]

Each system is started once, and sent the mix at one concurrency after the other: three requests for each one in flight,
at least eight, none of which it has seen before.
"""

from dataclasses import asdict
from typing import Any

from benchmarks.deployment import prepare_model
from benchmarks.mix import PATH as MIX
from benchmarks.record import RESULTS, provenance
from benchmarks.runner import failures_exit, make_parser, publish
from benchmarks.serving.loads import sweep_loads
from benchmarks.serving.measure import run_system
from benchmarks.serving.report import sweep_table
from benchmarks.serving.systems import make_systems
from quire_client.bench.mix import read_mix

RESULT = RESULTS / "sweep.json"


def main() -> None:
    parser = make_parser(__doc__, RESULT)
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64", help="default 1,2,4,8,16,32,64")
    parser.add_argument("--systems", help="of quire, vllm and continuous_batching; default all that are installed")
    options = parser.parse_args()
    concurrencies = [int(number) for number in options.concurrency.split(",")]
    systems: dict[str, Any] = {}
    with failures_exit("sweep"):
        model = prepare_model()
        loads = sweep_loads(read_mix(MIX), concurrencies)
        for system in make_systems(model, options.systems.split(",") if options.systems else None):
            outcomes = run_system(system, loads)
            points = [{"concurrency": load.concurrency, **asdict(outcomes[load.name].figures)} for load in loads]
            systems[system.name] = {"title": system.title, "points": points}
    result = {**provenance("torch", "transformers"), "model": model.name, "systems": systems}
    title = f"{model.name}, bfloat16: output tokens/s, and time to first token p50"
    publish(result, options.output or RESULT, {title: sweep_table(result)})


if __name__ == "__main__":
    main()
