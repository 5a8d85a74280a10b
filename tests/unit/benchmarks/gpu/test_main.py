"""`make gpu-check` runs its parts in order, stops when its time is spent, and says what is wrong or missing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as gpu_check
from benchmarks.gpu.__main__ import PARTS, Part, problems, run_module, run_parts
from benchmarks.record import ROOT

WRITES = """
import json, pathlib, sys, time
assert "--dry-run" not in sys.argv
pathlib.Path(sys.argv[sys.argv.index("--output") + 1]).write_text(json.dumps({"cases": [1]}))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A part's module, which writes a result; with `sleep` among its flags it goes on for a minute then."""
    (tmp_path / "part_of_check.py").write_text(WRITES + 'if "sleep" in sys.argv: time.sleep(60)\n')
    monkeypatch.setattr(gpu_check, "PYTHON_PATH", [str(tmp_path)])
    return "part_of_check"


def test_a_part_that_takes_too_long_keeps_what_it_has_and_the_next_ones_are_not_begun(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 1.0)
    output = tmp_path / "report.json"
    report: dict[str, Any] = {}
    parts = [Part("one", 30.0, (module,)), Part("two", 30.0, (module, "sleep")), Part("three", 30.0, (module,))]
    run_parts(parts, 6.0, report, output, dry_run=False)
    assert json.loads(output.read_text()) == report
    assert report["one"]["complete"]
    assert report["two"]["cases"] == [1]
    assert report["two"]["error"].startswith("took more than")
    assert report["three"] == {"complete": False, "error": "not begun: 6 s were over"}
    assert [line.split("\n")[0] for line in problems(report, parts)] == [
        f"two: {report['two']['error']}".split("\n")[0],
        "three: not begun: 6 s were over",
        "incomplete: two",
        "incomplete: three",
    ]


def test_a_part_finds_packages_in_the_path(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "part_with_package.py").write_text(f"import {module}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    assert run_module(("part_with_package",), 60.0)["complete"]


def test_processes_of_a_part_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "part_that_waits.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not run_module(("part_that_waits",), 10.0)["complete"]
    child = Path("/proc", pid.read_text(), "stat")
    # Until the system has taken it away, or noted that it has ended
    for _ in range(100):
        if not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the child is alive")


def test_wrong_kernels_and_failed_tests_are_problems() -> None:
    checks = [
        {"name": "right", "holds": True, "error": 0.0},
        {"name": "wrong", "holds": False, "error": 0.5},
        {"name": "broken", "holds": False, "failure": "ValueError: no"},
    ]
    report = {
        "correct": {"complete": True, "checks": checks},
        "tests": {"complete": True, "failed": ["tests/gpu/a.py::b"], "unfinished": ["tests/gpu/a.py::c"]},
    }
    assert problems(report, [Part("correct", 1.0), Part("tests", 1.0)]) == [
        "wrong: wrong: 0.5",
        "wrong: broken: ValueError: no",
        "failed: tests/gpu/a.py::b",
        "not ended in time: tests/gpu/a.py::c",
    ]


def test_the_order_is_what_is_right_then_what_is_fast_then_the_tests() -> None:
    assert [part.name for part in PARTS] == ["correct", "decode", "ops", "kernels", "flex", "tests"]
    assert PARTS[0].seconds <= 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu_check.main() == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
def test_a_dry_run_walks_all_parts(bare_python: Path, tmp_path: Path) -> None:
    """All of it but the tests, which are skipped without a GPU. It needs no other packages than it says."""
    output = tmp_path / "report.json"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = (bare_python, "-m", "benchmarks.gpu", "--dry-run", "--output", output)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert all(check["holds"] for check in report["correct"]["checks"])
    assert {case["op"] for case in report["kernels"]["cases"]} == {"paged_decode", "paged_attention"}
    assert {case["op"] for case in report["flex"]["cases"]} == {"paged_attention"}
    assert {case["op"] for case in report["ops"]["cases"]} >= {"sample", "rotary_store", "block_copy"}
    assert [case["num_seqs"] for case in report["decode"]["cases"]] == [1, 2]
    assert report["decode"]["mixed"]
    assert set(report["tests"]["counts"]) == {"SKIPPED"}
