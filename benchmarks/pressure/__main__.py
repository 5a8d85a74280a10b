"""Measures preemption and long prompts on the real model while KV memory is short (`make bench-pressure`).

    python -m benchmarks.pressure [--runs 5] [--quick] [--parts choice,long-prompt] [--output FILE]

choice: a load arrives at once, with KV blocks for a quarter of it. Preempted sequences are always swapped, always
recomputed, or whichever costs less. Each regime of loads.py has a deployment for each mode; the load is sent to them in
turns, each time with new prompts.

long-prompt: streams at a steady rate, alone and while a long prompt is computed beside them.

Targets are in report.py. Only both parts together replace the result; with --quick all is smaller and runs once.
"""

from typing import Any

from benchmarks.deployment import prepare_model
from benchmarks.pressure.choice import measure_regime
from benchmarks.pressure.loads import REGIMES
from benchmarks.pressure.long_prompt import NUM_STREAMS, PROMPT_TOKENS, measure_long_prompt
from benchmarks.pressure.report import (
    choice_table,
    judge_long_prompt,
    judge_regimes,
    long_prompt_table,
    moved_table,
)
from benchmarks.record import RESULTS, provenance
from benchmarks.runner import failures_exit, make_parser, publish

RESULT = RESULTS / "pressure.json"
CHOICE, LONG_PROMPT = PARTS = ("choice", "long-prompt")
QUICK_PROMPT_TOKENS = 1_500  # still cut into chunks for the sake of streams


def measure(parts: list[str], num_runs: int, quick: bool) -> dict[str, Any]:
    """The parts as a result holds them. Raises BenchmarkFailed, or a client's error."""
    result: dict[str, Any] = {"num_runs": num_runs, "targets": []}
    if CHOICE in parts:
        regimes = [regime.quick() if quick else regime for regime in REGIMES]
        figures = {regime.name: measure_regime(regime, num_runs) for regime in regimes}
        result["regimes"] = {regime.name: {**regime.describe(), **figures[regime.name].to_json()} for regime in regimes}
        result["targets"] += judge_regimes(figures)
    if LONG_PROMPT in parts:
        prompt_tokens = QUICK_PROMPT_TOKENS if quick else PROMPT_TOKENS
        long_prompt = measure_long_prompt(prompt_tokens, num_runs)
        result |= {"num_streams": NUM_STREAMS, "prompt_tokens": prompt_tokens, "long_prompt": long_prompt.to_json()}
        result["targets"] += judge_long_prompt(long_prompt)
    return result


def main() -> None:
    """Exits with 1 where there are no figures; missed targets do not change the status."""
    parser = make_parser(__doc__, RESULT, ", for the whole")
    parser.add_argument("--runs", type=int, help="runs of each; default 5, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="smaller loads, for a quick pass")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default {','.join(PARTS)}")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}")
    num_runs = (1 if options.quick else 5) if options.runs is None else options.runs
    if num_runs < 1:
        parser.error("--runs is at least 1")
    is_whole = not options.quick and set(parts) == set(PARTS)
    with failures_exit("pressure"):
        model = prepare_model()
        result = {**provenance("torch", "grpcio"), "model": model.name, **measure(parts, num_runs, options.quick)}
    tables = {}
    if CHOICE in parts:
        tables["A load on a quarter of its KV memory"] = choice_table(result)
        tables["Rates and estimated costs"] = moved_table(result)
    if LONG_PROMPT in parts:
        tables["Streams and a long prompt"] = long_prompt_table(result)
    publish(result, options.output or (RESULT if is_whole else None), tables)


if __name__ == "__main__":
    main()
