"""Runs the tests that need a GPU: several processes at once, since most of the time is spent on compiling kernels.

Outcomes are read from pytest's output, so that a test that hangs loses no other outcome.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.record import ROOT

FOLDERS = ("tests/kernels", "tests/gpu")
# Tests of the CPU backend, which need a C++ compiler, of kernels that are compiled for other GPUs, and of plans, which
# need no GPU, but hypothesis.
IGNORED = (
    *("tests/kernels/cpu", "tests/kernels/test_cpu_attention.py"),
    *("tests/kernels/aot", "tests/kernels/test_decode_plan.py"),
)
# Each compiles one kernel at a time; some cases use several gigabytes of device memory.
MAX_PROCESSES = 15
COLLECT_SECONDS = 90.0

# As in pyproject.toml, which pytest must not read here: it asks for plugins that may be missing.
PYTHON_PATH = [str(ROOT / folder) for folder in ("", "protos", "kernels", "client", "tests/support")]
_OUTCOME = re.compile(r"^(\S.*?::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)


def run_tests(seconds: float, folders: Sequence[str] = FOLDERS) -> dict[str, Any]:
    """Counts of outcomes, and the names of tests that failed. `complete`: every test ended before `seconds` passed."""
    deadline = time.monotonic() + seconds
    present = [folder for folder in folders if (ROOT / folder).is_dir()]
    names, problem = collect(present, min(COLLECT_SECONDS, seconds))
    if problem is not None:
        return {"folders": present, "complete": False, "error": problem}
    with TemporaryDirectory(prefix="quire-gpu-tests-") as folder:
        logs = _run_all(names, Path(folder), deadline)
        outcomes = [match for log in logs for match in outcomes_in(log)]
        counts = Counter(outcome for _, outcome in outcomes)
        failed = sorted(name for name, outcome in outcomes if outcome in ("FAILED", "ERROR"))
        ran = {name for name, _ in outcomes}
        return {
            "folders": present,
            "num_tests": len(names),
            "counts": dict(counts),
            "failed": failed[:50],
            "unfinished": sorted(set(names) - ran)[:50],
            "complete": ran >= set(names),
            "seconds": round(time.monotonic() - deadline + seconds, 1),
            "output": "\n".join(log[-3000:] for log in logs if "FAILED" in log or "ERROR" in log)[:10000],
        }


def module_path(folders: Iterable[str]) -> str:
    """PYTHONPATH with these folders first. What it has already stays: where nothing can be installed, packages may be
    there.
    """
    return os.pathsep.join([*folders, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def collect(folders: Iterable[str] = FOLDERS, seconds: float = COLLECT_SECONDS) -> tuple[list[str], str | None]:
    """The names of the tests in these folders; and why there are none, if they could not be collected in time."""
    ignored = [f"--ignore={ROOT / path}" for path in IGNORED]
    command = (*_pytest(), "--collect-only", "-q", *ignored, *folders)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return [], f"the tests were not collected in {seconds:.0f} s"
    if done.returncode != 0:
        return [], f"the tests could not be collected:\n{(done.stdout + done.stderr)[-3000:]}"
    return [line for line in done.stdout.splitlines() if "::" in line], None


def end_session(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process that has a session of its own, and all processes that it has started there."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcomes_in(log: str) -> list[tuple[str, str]]:
    """Tests and their outcomes in what `pytest -v` printed."""
    return [(match[1], match[2]) for match in _OUTCOME.finditer(log)]


def split_tests(names: Sequence[str], num_groups: int) -> list[list[str]]:
    """The tests in groups of about the same size, none of them empty."""
    return [group for start in range(num_groups) if (group := list(names[start::num_groups]))]


def _run_all(names: Sequence[str], folder: Path, deadline: float) -> list[str]:
    """The output of each process, until all have ended or the deadline has passed."""
    processes: list[subprocess.Popen[bytes]] = []
    logs: list[Path] = []
    for number, group in enumerate(split_tests(names, min(MAX_PROCESSES, os.cpu_count() or 1))):
        (folder / f"{number}.tests").write_text("\n".join(group))
        logs.append(folder / f"{number}.log")
        with logs[-1].open("wb") as output:
            command = (*_pytest(), "-v", "--tb=short", f"@{folder / f'{number}.tests'}")
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=_environment(), stdout=output, stderr=output, start_new_session=True
                )
            )
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            end_session(process)
    return [log.read_text(errors="replace") for log in logs]


def _pytest() -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib"),
        *("-p", "no:cacheprovider", "--no-header"),
    )


def _environment() -> dict[str, str]:
    settings = {"PYTHONPATH": module_path(PYTHON_PATH), "PYTHONUNBUFFERED": "1", "PYTEST_ADDOPTS": ""}
    return os.environ | settings
