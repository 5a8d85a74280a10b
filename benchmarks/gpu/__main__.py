"""Tests and measures all that needs a GPU, in less than ten minutes, and writes one JSON file (`make gpu-check`).

    python -m benchmarks.gpu [--output FILE]

Needs torch, triton, transformers, numpy and pytest; the project need not be installed. Each part is a process with a
time limit, and the file is written after each. Exits with 0 if all tests pass and all parts are complete, 1 if not, 2
without a GPU. Missed targets do not change the status.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.tests import PYTHON_PATH, run_tests
from benchmarks.record import RESULTS, ROOT, describe_gpu, provenance, read_result, write_result

RESULT = RESULTS / "gpu_check.json"
TEST_SECONDS = 320.0
# Peers that must be compiled would take longer than all the rest: `python -m benchmarks.kernels` has them.
MODULES = {
    "kernels": (("benchmarks.kernels", "--skip-peers", "compile,Flex"), 130.0),
    "decode": (("benchmarks.gpu.decode",), 110.0),
}


def run_module(module: Sequence[str], seconds: float) -> dict[str, Any]:
    """The result that a benchmark writes, incomplete where it takes too long or fails."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="quire-gpu-") as folder:
        output, log = Path(folder, "result.json"), Path(folder, "log")
        with log.open("wb") as printed:
            try:
                status: int | None = subprocess.run(
                    (sys.executable, "-m", *module, "--output", str(output)),
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(PYTHON_PATH)},
                    stdout=printed,
                    stderr=printed,
                    timeout=seconds,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
        result = read_result(output) or {}
        result |= {"complete": status == 0, "seconds": round(time.monotonic() - began, 1)}
        if status != 0:
            why = f"took more than {seconds:.0f} s" if status is None else f"ended with status {status}"
            result["error"] = f"{why}\n{log.read_text(errors='replace')[-3000:]}"
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT, help=f"file for the result; default {RESULT.name}")
    options = parser.parse_args()
    gpu = describe_gpu()
    if gpu is None:
        print("gpu-check: torch finds no GPU on this machine", file=sys.stderr)
        return 2
    report: dict[str, Any] = {**provenance("torch", "triton", "transformers", "pytest"), "gpu": gpu}
    # Tests first: the speed of a kernel that is wrong says nothing. Measurements need the device alone.
    print(f"tests: at most {TEST_SECONDS:.0f} s", file=sys.stderr, flush=True)
    report["tests"] = run_tests(TEST_SECONDS)
    write_result(options.output, report)
    for part, (module, seconds) in MODULES.items():
        print(f"{part}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
        report[part] = run_module(module, seconds)
        write_result(options.output, report)
    print(options.output.read_text())
    for name in report["tests"].get("failed", []):
        print(f"failed: {name}", file=sys.stderr)
    for part in MODULES:
        if "error" in report[part]:
            print(f"{part}: {report[part]['error']}", file=sys.stderr)
    passed = report["tests"]["complete"] and not report["tests"].get("failed")
    return 0 if passed and all(report[part]["complete"] for part in MODULES) else 1


if __name__ == "__main__":
    sys.exit(main())
