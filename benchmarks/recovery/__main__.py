"""Measures, on the real model, how long streams stand still when a process dies (`make bench-recovery`).

    python -m benchmarks.recovery [--runs 20] [--cases worker,gateway] [--output FILE]

Eight streams run, a process is killed at some token of theirs, and what counts is the time until they go on: that one
which does so first, and that which does so last. figures.py says how. Every case whole makes a result.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.processes import BenchmarkFailed
from benchmarks.record import RESULTS, provenance, write_result
from benchmarks.recovery.cases import CASES
from benchmarks.recovery.figures import judge
from benchmarks.recovery.measure import MAX_TOKENS, NUM_STREAMS, measure_case
from benchmarks.recovery.report import recovery_table, target_lines
from benchmarks.serving.prepare import end_on_signals, prepare_model, report
from quire_client.errors import QuireError
from svc_common.models import ModelNotFound

RESULT = RESULTS / "recovery.json"


def main() -> None:
    """Reads flags, measures, writes. Exits with 1 where there are no figures, whatever they are otherwise with 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="faults of each kind; default 20")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES), help="default all of them")
    parser.add_argument("--output", type=Path, help=f"file for the result; default {RESULT.name}, for all cases")
    options = parser.parse_args()
    names = options.cases.split(",")
    if unknown := set(names) - {case.name for case in CASES}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if options.runs < 1:
        parser.error("--runs is at least 1")
    chosen = [case for case in CASES if case.name in names]
    end_on_signals()
    measured: dict[str, dict[str, Any]] = {}
    try:
        model = prepare_model()
        with tempfile.TemporaryDirectory(prefix="quire-recovery-") as folder:
            for case in chosen:
                report(case.title)
                figures = asyncio.run(measure_case(case, options.runs, Path(folder, case.name), report))
                measured[case.name] = {"title": case.title, **figures.to_json()}
    except (BenchmarkFailed, ModelNotFound, QuireError) as error:
        sys.exit(f"recovery: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    result = {
        **provenance("torch", "grpcio"),
        "model": model.name,
        "num_runs": options.runs,
        "num_streams": NUM_STREAMS,
        "max_tokens": MAX_TOKENS,
        "cases": measured,
        "targets": judge(measured, {case.name: case.bound for case in chosen}),
    }
    recovery_table(result).print("From a fault to the next token")
    print("\n".join(target_lines(result)))
    if output := options.output or (RESULT if len(chosen) == len(CASES) else None):
        write_result(output, result)
        print(f"written to {os.path.relpath(output)}", file=sys.stderr)


if __name__ == "__main__":
    main()
