"""Judges, on the real model, how KV memory under pressure is dealt with (`make bench-pressure`).

    python -m benchmarks.pressure [--runs 5] [--quick] [--parts choice,long-prompt] [--output FILE]

choice: with blocks for a quarter of a load that comes at once, sequences that give way are swapped, or computed again,
or either by what it costs. Each regime of loads.py has a deployment for each mode; they are put under the load in
turns, each time with prompts that none of them has seen.

long-prompt: streams at a steady pace, alone and while a long prompt is computed beside them.

What is asked is said in figures.py. Both parts whole make a result; with --quick everything is smaller and runs once.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import httpx

from benchmarks.pressure.choice import measure_regime
from benchmarks.pressure.figures import judge_long_prompt, judge_regimes
from benchmarks.pressure.loads import REGIMES
from benchmarks.pressure.long_prompt import NUM_STREAMS, PROMPT_TOKENS, measure_long_prompt
from benchmarks.pressure.report import choice_table, long_prompt_table, moved_table, target_lines
from benchmarks.processes import BenchmarkFailed
from benchmarks.record import RESULTS, provenance, write_result
from benchmarks.serving.prepare import end_on_signals, prepare_model, report
from quire_client.bench.targets import TargetError
from quire_client.errors import QuireError
from svc_common.models import ModelNotFound

RESULT = RESULTS / "pressure.json"
CHOICE, LONG_PROMPT = PARTS = ("choice", "long-prompt")
QUICK_PROMPT_TOKENS = 1_500  # still one that is held back for the sake of streams


def measure(parts: list[str], num_runs: int, quick: bool) -> dict[str, Any]:
    """Every part, as a result holds it. Raises BenchmarkFailed, or what clients raise."""
    result: dict[str, Any] = {"num_runs": num_runs, "targets": []}
    if CHOICE in parts:
        regimes = [regime.quick() if quick else regime for regime in REGIMES]
        figures = {regime.name: measure_regime(regime, num_runs, report) for regime in regimes}
        result["regimes"] = {regime.name: {**regime.describe(), **figures[regime.name].to_json()} for regime in regimes}
        result["targets"] += judge_regimes(figures)
    if LONG_PROMPT in parts:
        prompt_tokens = QUICK_PROMPT_TOKENS if quick else PROMPT_TOKENS
        long_prompt = measure_long_prompt(prompt_tokens, num_runs, report)
        result |= {"num_streams": NUM_STREAMS, "prompt_tokens": prompt_tokens, "long_prompt": long_prompt.to_json()}
        result["targets"] += judge_long_prompt(long_prompt)
    return result


def main() -> None:
    """Reads flags, measures, writes. Exits with 1 where there are no figures, whatever they are otherwise with 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="runs of each; default 5, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="smaller loads, to see that all of it works")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default {','.join(PARTS)}")
    parser.add_argument("--output", type=Path, help=f"file for the result; default {RESULT.name}, for the whole")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}")
    num_runs = (1 if options.quick else 5) if options.runs is None else options.runs
    if num_runs < 1:
        parser.error("--runs is at least 1")
    is_whole = not options.quick and set(parts) == set(PARTS)
    output = options.output or (RESULT if is_whole else None)
    end_on_signals()
    try:
        model = prepare_model()
        result = {**provenance("torch", "grpcio"), "model": model.name, **measure(parts, num_runs, options.quick)}
    except (BenchmarkFailed, ModelNotFound, QuireError, TargetError, httpx.HTTPError) as error:
        sys.exit(f"pressure: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if CHOICE in parts:
        choice_table(result).print("A load on a quarter of its KV memory")
        moved_table(result).print("What the choice rests on")
    if LONG_PROMPT in parts:
        long_prompt_table(result).print("Streams and a long prompt")
    print("\n".join(target_lines(result)))
    if output:
        write_result(output, result)
        print(f"written to {os.path.relpath(output)}", file=sys.stderr)


if __name__ == "__main__":
    main()
