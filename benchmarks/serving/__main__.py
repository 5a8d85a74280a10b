"""Compares Quire with vLLM's build for processors, and with transformers' static batches (`make bench`).

    [VLLM_VENV=ENVIRONMENT] python -m benchmarks.serving [--runs 3] [--systems quire,…] [--requests N] [--output FILE]

Each is an HTTP server under one load generator; only static batches have no server, and get all requests at once. The
systems take turns on the machine, each started anew for each run, in bfloat16, greedy, with end-of-text ignored; two
requests warm up. vLLM has all cores that Quire has, once with its own budget for a step and once with Quire's.
transformers' continuous batching takes part where it is named. Figures are medians over the runs:
quire_client/bench/latency.py defines them, loads.py the requests, report.py the targets.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from benchmarks.deployment import prepare_model
from benchmarks.mix import PATH as MIX
from benchmarks.record import RESULTS, provenance, write_result
from benchmarks.runner import failures_exit, log, make_parser, median_of
from benchmarks.serving.loads import ServingLoad, comparison_loads
from benchmarks.serving.measure import Outcome, run_static_batches, run_system
from benchmarks.serving.report import RATIOS, comparison_table, judge, ratio_table, summary_lines
from benchmarks.serving.systems import Vllm, make_systems
from quire_client.bench.mix import read_mix

RESULT = RESULTS / "serving.json"
STATIC = "static_batches"


class ComparedSystem(NamedTuple):
    """`run` starts the system, sends it the loads, and stops it."""

    name: str
    title: str
    run: Callable[[], dict[str, Outcome]]


def measure(compared_systems: Sequence[ComparedSystem], num_runs: int) -> Iterator[dict[str, dict[str, list[Outcome]]]]:
    """All runs in turns; after each, the outcomes so far by system and load."""
    outcomes: dict[str, dict[str, list[Outcome]]] = {compared_system.name: {} for compared_system in compared_systems}
    for run in range(num_runs):
        log(f"run {run + 1} of {num_runs}")
        for compared_system in compared_systems:
            for load, outcome in compared_system.run().items():
                outcomes[compared_system.name].setdefault(load, []).append(outcome)
        yield outcomes


def summarize_runs(
    compared_systems: Sequence[ComparedSystem],
    loads: Sequence[ServingLoad],
    outcomes: dict[str, dict[str, list[Outcome]]],
) -> dict[str, Any]:
    """Loads, systems and targets as a result holds them."""
    medians = {
        name: {load: median_of([outcome.figures for outcome in runs]) for load, runs in by_load.items()}
        for name, by_load in outcomes.items()
    }
    systems: dict[str, Any] = {}
    for compared_system in compared_systems:
        systems[compared_system.name] = {"title": compared_system.title, "loads": {}}
        for load, runs in outcomes[compared_system.name].items():
            wasted = [outcome.kv_wasted for outcome in runs if outcome.kv_wasted is not None]
            systems[compared_system.name]["loads"][load] = {
                "median": asdict(medians[compared_system.name][load]),
                "kv_wasted": median(wasted) if wasted else None,
                "runs": [asdict(outcome.figures) for outcome in runs],
            }
    return {
        "loads": {load.name: load.describe() for load in loads},
        "systems": systems,
        "targets": judge(medians),
    }


def main() -> None:
    """Exits with 1 where there are no figures; missed targets do not change the status."""
    parser = make_parser(__doc__, RESULT, ", for whole loads")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; default 3")
    known = f"quire, vllm, vllm_small_steps, continuous_batching and {STATIC}"
    parser.add_argument("--systems", help=f"of {known}; default all but continuous_batching")
    parser.add_argument("--requests", type=int, help="at most so many in each load, for a quick pass; default all")
    options = parser.parse_args()
    if options.runs < 1 or (options.requests or 1) < 1:
        parser.error("--runs and --requests are at least 1")
    output = options.output or (RESULT if options.requests is None else None)
    with failures_exit("serving"):
        model = prepare_model()
        names = None if options.systems is None else options.systems.split(",")
        systems = make_systems(model, names and [name for name in names if name != STATIC])
        tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
        loads = comparison_loads(read_mix(MIX), tokenizer, options.requests)
        compared_systems = [ComparedSystem(s.name, s.title, partial(run_system, s, loads)) for s in systems]
        if names is None or STATIC in names:
            at_once = next(load for load in loads if load.name == "mix-48")
            run = partial(run_static_batches, model.path, at_once)
            compared_systems.append(ComparedSystem(STATIC, "transformers, static batches of 8", run))
        head = {
            **provenance("torch", "transformers", "grpcio"),
            "model": model.name,
            "vllm": next((system.version() for system in systems if isinstance(system, Vllm)), None),
        }
        # Written after each run, so that a failure of a later one loses only that run.
        for num_runs, outcomes in enumerate(measure(compared_systems, options.runs), 1):
            result = head | {"num_runs": num_runs} | summarize_runs(compared_systems, loads, outcomes)
            if output:
                write_result(output, result)
    comparison_table(result).print(summary_lines(result))
    ratio_table(result).print(RATIOS)
    if output:
        log(f"written to {output}")


if __name__ == "__main__":
    main()
