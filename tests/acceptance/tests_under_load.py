"""Runs `make test` several times in a row beside processes that never sleep.

    python -m tests.acceptance.tests_under_load [--runs 3] [--busy 2]

A test that depends on timing fails here first. The last line is JSON.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.record import ROOT

_FAILURE = re.compile(r"\b(FAILED|ERROR) tests/")


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keeps `count` CPUs busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_tests(arguments: str) -> tuple[bool, str]:
    """Whether every test passed, and pytest's last line. Installs nothing."""
    stamp = Path(sys.prefix, ".installed")
    # Each test's outcome as it comes: after an error of pytest's own there is no summary.
    command = ["make", f"--old-file={stamp}", "test", f"VENV={sys.prefix}", f"TEST_ARGS=-v {arguments}"]
    lines = [""]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            lines.append(line.rstrip())
            if _FAILURE.search(line):
                print(line, end="", flush=True)
    if process.returncode:
        print("\n".join(lines[-200:]), flush=True)
    return process.returncode == 0, re.sub(r"^=+ | =+$", "", lines[-1])


def main() -> None:
    """Parses the flags, runs the tests, and prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="default %(default)s")
    parser.add_argument("--busy", type=int, default=2, help="busy processes, default %(default)s")
    parser.add_argument("--test-args", default="", help="more arguments for pytest, in one string")
    options = parser.parse_args()
    runs = []
    with busy_processes(options.busy):
        for number in range(1, options.runs + 1):
            passed, summary = run_tests(options.test_args)
            runs.append({"passed": passed, "summary": summary})
            print(f"run {number} of {options.runs}: {summary}", flush=True)
    print(json.dumps({"busy_processes": options.busy, "runs": runs}))
    sys.exit(0 if all(run["passed"] for run in runs) else 1)


if __name__ == "__main__":
    main()
