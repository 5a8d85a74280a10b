"""Measures what the journal costs streams, how far it is behind, and what Redis holds (`make bench-journal`).

    python -m benchmarks.journal [--runs 5] [--steps 1000] [--output FILE]

64 sequences decode on a worker whose forward pass sleeps for 10 ms, with the journal, without it, and with it while
Redis takes half a second for each answer; the three take turns. What is asked is said in figures.py.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.journal.figures import MODES, JournalRun, judge, summarize
from benchmarks.journal.measure import FORWARD_SECONDS, NUM_SEQUENCES, OUTPUT_TOKENS, measure_gaps, measure_memory
from benchmarks.journal.report import journal_table, target_lines
from benchmarks.processes import BenchmarkFailed
from benchmarks.record import RESULTS, provenance, write_result
from benchmarks.serving.prepare import end_on_signals, report

RESULT = RESULTS / "journal.json"


def measure(num_runs: int, num_steps: int) -> dict[str, Any]:
    """All of it, as a result holds it. Raises BenchmarkFailed."""
    runs: dict[str, list[JournalRun]] = {mode: [] for mode in MODES}
    for number in range(num_runs):
        # Each begins in its turn: what goes on beside on the machine hits all alike.
        for mode in MODES[number % len(MODES) :] + MODES[: number % len(MODES)]:
            report(f"run {number + 1}, {mode}")
            runs[mode].append(measure_gaps(mode, num_steps))
    report("memory")
    head = {
        "num_runs": num_runs,
        "num_steps": num_steps,
        "num_sequences": NUM_SEQUENCES,
        "forward_ms": FORWARD_SECONDS * 1e3,
        "output_tokens": OUTPUT_TOKENS,
    }
    result = {**head, **summarize(runs, measure_memory())}
    return {**result, "targets": judge(result)}


def main() -> None:
    """Reads flags, measures, writes. Exits with 1 where there are no figures, whatever they are otherwise with 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each mode; default 5")
    parser.add_argument("--steps", type=int, default=1000, help="steps that count in each; default 1000")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"file for the result; default {RESULT.name}")
    options = parser.parse_args()
    if options.runs < 1 or options.steps < 1:
        parser.error("--runs and --steps are at least 1")
    end_on_signals()
    try:
        result = {**provenance("grpcio", "redis", "uvloop"), **measure(options.runs, options.steps)}
    except BenchmarkFailed as error:
        sys.exit(f"journal: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    journal_table(result).print("Streams and the journal")
    print("\n".join(target_lines(result)))
    write_result(options.output, result)
    print(f"written to {os.path.relpath(options.output)}", file=sys.stderr)


if __name__ == "__main__":
    main()
