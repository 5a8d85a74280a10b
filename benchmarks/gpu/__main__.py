"""Tests and measures all that needs a GPU, and writes one JSON file (`make gpu-check`).

    python -m benchmarks.gpu [--dry-run] [--output FILE]

In this order: all ops and the tokens of a model against references; decode steps of Llama 3 8B's shape and the host's
time of mixed steps; ops beside their peers, attention last; the GPU tests. Each part is a process with a time limit,
and the file is written after each. After 520 s it stops with what it has, and names the parts that are missing. Needs
torch, triton, transformers, numpy and pytest, with what these require; the project need not be installed, and what
PYTHONPATH names is found.

Exits with 0 if all kernels are right, all tests pass and all parts are complete, 1 if not, 2 without a GPU. Missed
targets of speed do not change the status. `--dry-run` runs all parts at small sizes, on a CPU too.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.tests import PYTHON_PATH, end_session, module_path, run_tests
from benchmarks.record import RESULTS, ROOT, describe_gpu, provenance, read_result, write_result

RESULT = RESULTS / "gpu_check.json"
BUDGET_SECONDS = 520.0
# Parts that would have less than this are not begun.
LEAST_SECONDS = 5.0
# Of a dry run, whose kernels are interpreted
DRY_SLOWDOWN = 5.0
TESTS = "tests"
DRY_TESTS = ("tests/gpu",)


@dataclass(frozen=True)
class Part:
    """A part of the result: a module, with `--dry-run` added in a dry run; TESTS is `run_tests`."""

    name: str
    seconds: float
    module: tuple[str, ...] = ()


PARTS = (
    Part("correct", 60.0, ("benchmarks.gpu.correct",)),
    Part("decode", 120.0, ("benchmarks.gpu.decode",)),
    Part("ops", 60.0, ("benchmarks.kernels", "--skip", "paged_", "--skip-peers", "compile")),
    Part("kernels", 110.0, ("benchmarks.kernels", "--only", "paged_", "--skip-peers", "compile,Flex")),
    # FlexAttention is compiled for each shape: for prompts only.
    Part("flex", 50.0, ("benchmarks.kernels", "--only", "paged_attention", "--skip-peers", "compile,SDPA,flash,Flash")),
    Part(TESTS, 340.0),
)


def run_module(module: Sequence[str], seconds: float, *, interpreted: bool = False) -> dict[str, Any]:
    """The result that a benchmark writes, incomplete where it takes too long or fails. `interpreted`: by Triton's
    interpreter.
    """
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": module_path(PYTHON_PATH)}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    with TemporaryDirectory(prefix="quire-gpu-") as folder:
        output, log = Path(folder, "result.json"), Path(folder, "log")
        command = (sys.executable, "-m", *module, "--output", str(output))
        with log.open("wb") as printed:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=printed, stderr=printed, start_new_session=True
            )
            status: int | None = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(seconds)
            finally:
                # What it has started would disturb the next part.
                end_session(process)
        result = read_result(output) or {}
        result |= {"complete": status == 0, "seconds": round(time.monotonic() - began, 1)}
        if status != 0:
            why = f"took more than {seconds:.0f} s" if status is None else f"ended with status {status}"
            result["error"] = f"{why}\n{log.read_text(errors='replace')[-3000:]}"
        return result


def run_parts(parts: Sequence[Part], budget: float, report: dict[str, Any], output: Path, *, dry_run: bool) -> None:
    """Runs the parts until the budget, in seconds, is spent. Adds each to the report, which is written after each."""
    slowdown = DRY_SLOWDOWN if dry_run else 1.0
    ends = time.monotonic() + budget * slowdown
    for part in parts:
        seconds = min(part.seconds * slowdown, ends - time.monotonic())
        if seconds < LEAST_SECONDS:
            report[part.name] = {"complete": False, "error": f"not begun: {budget:.0f} s were over"}
        else:
            print(f"{part.name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
            if part.name == TESTS:
                report[TESTS] = run_tests(seconds, *((DRY_TESTS,) if dry_run else ()))
            else:
                report[part.name] = run_module(
                    (*part.module, *(("--dry-run",) if dry_run else ())),
                    seconds,
                    interpreted=dry_run and report.get("gpu") is None,
                )
        write_result(output, report)


def problems(report: dict[str, Any], parts: Sequence[Part]) -> list[str]:
    """What is wrong or missing, a line each."""
    found = [f"{part.name}: {report[part.name]['error']}" for part in parts if "error" in report[part.name]]
    found += [
        f"wrong: {check['name']}: {check.get('failure') or check['error']}"
        for check in report.get("correct", {}).get("checks", [])
        if not check["holds"]
    ]
    found += [f"failed: {name}" for name in report.get(TESTS, {}).get("failed", [])]
    found += [f"not ended in time: {name}" for name in report.get(TESTS, {}).get("unfinished", [])]
    return found + [f"incomplete: {part.name}" for part in parts if not report[part.name]["complete"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small sizes, without a GPU too; not for reports")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"file for the result; default {RESULT.name}")
    options = parser.parse_args()
    gpu = describe_gpu()
    if gpu is None and not options.dry_run:
        print("gpu-check: torch finds no GPU on this machine", file=sys.stderr)
        return 2
    if options.dry_run and options.output == RESULT:
        parser.error("--dry-run needs --output: its figures are of no use")
    report: dict[str, Any] = {**provenance("torch", "triton", "transformers", "pytest"), "gpu": gpu}
    run_parts(PARTS, BUDGET_SECONDS, report, options.output, dry_run=options.dry_run)
    print(options.output.read_text())
    found = problems(report, PARTS)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
