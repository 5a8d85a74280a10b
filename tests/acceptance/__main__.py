"""Runs the large checks and writes what they found (`make acceptance`).

    python -m tests.acceptance [--parts chaos,tests_under_load] [--output FILE]

Each part is a program of its own. Its last line is its summary; a summary in JSON is kept as such. Exits with 1 where a
part failed; the other parts run nevertheless.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, provenance, read_result, write_result

PARTS: dict[str, tuple[str, ...]] = {
    "large_tests": ("pytest", "-m", "large", "--numprocesses", "auto", "--dist", "loadfile"),
    "core_worlds": ("tests.acceptance.core_worlds", "--worlds", "5000"),
    "core_mutants": ("tests.acceptance.core_mutants",),
    "connection_floods": ("tests.acceptance.connection_floods", "--connections", "10000"),
    "fuzz": ("tests.acceptance.fuzz", "--seconds", "300"),
    "chaos": ("tests.chaos", "--faults", "200", "--clients", "32"),
    "flood": ("tests.acceptance.flood", "--chats", "500"),
    "mixed_loads": ("tests.acceptance.mixed_loads", "--chats", "300"),
    "memory": ("tests.acceptance.memory_limit",),
    "constrained": ("tests.acceptance.constrained", "--requests", "1000"),
    "batch": ("tests.acceptance.batch", "--lines", "1000", "--kills", "5"),
    "offline": ("tests.acceptance.offline", "--prompts", "200", "--streams", "64"),
    "token_budgets": ("tests.acceptance.token_budgets",),
    "embeddings": ("tests.acceptance.embeddings",),
    "chat_templates": ("tests.acceptance.chat_templates", "--examples", "200"),
    "clients": ("tests.clients",),
    "peers": ("tests.peers", "--resume"),
    "tests_under_load": ("tests.acceptance.tests_under_load", "--runs", "3", "--busy", "2"),
}
"""Module and arguments of each part, in the order in which they run."""


def run_part(command: tuple[str, ...]) -> dict[str, Any]:
    """Runs a part and returns its result. The output of the part is printed as it arrives."""
    started = time.monotonic()
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "protos", "kernels", "client", "tests/support"))
    last = ""
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return {
        "command": "python -m " + " ".join(command),
        **provenance(),
        "passed": process.returncode == 0,
        "seconds": round(time.monotonic() - started),
        "summary": read_summary(last),
    }


def read_summary(line: str) -> Any:
    """A part's last line: an object where it is JSON, else the text."""
    try:
        return json.loads(line)
    except ValueError:
        return line


def main() -> None:
    """Parses the flags, runs the parts, and writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="default all: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS / "acceptance.json", help="file for the result")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"argument --parts: no part named {unknown[0]!r}")
    results = read_result(options.output) or {}
    for name in names:
        print(f"acceptance: {name}", flush=True)
        results[name] = run_part(PARTS[name])
        write_result(options.output, results)
    for name in names:
        print(f"{name}: {'passed' if results[name]['passed'] else 'FAILED'} in {results[name]['seconds']} s")
    sys.exit(0 if all(results[name]["passed"] for name in names) else 1)


if __name__ == "__main__":
    main()
