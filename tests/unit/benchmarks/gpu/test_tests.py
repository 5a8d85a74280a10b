"""Tests in several processes: the results that pytest prints are counted, also when a process fails."""

from pathlib import Path

import pytest

from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu.tests import outcomes_in, run_tests, split_tests

LOG = """\
collecting ... collected 4 items

tests/kernels/test_a.py::test_one[1 x 2] PASSED                          [ 25%]
tests/kernels/test_a.py::test_two FAILED                                 [ 50%]
tests/kernels/test_a.py::test_three SKIPPED (needs a GPU)                [ 75%]
tests/kernels/test_a.py::test_four
"""

FILE = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test_passes(number): pass

def test_fails(): assert False

def test_crashes(): os._exit(1)
"""


SLOW = """
import time
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `some` of tests, in one process."""
    (tmp_path / "some").mkdir()
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "MAX_PROCESSES", 1)
    return tmp_path / "some"


def test_outcomes_are_read_as_they_come() -> None:
    assert outcomes_in(LOG) == [
        ("tests/kernels/test_a.py::test_one[1 x 2]", "PASSED"),
        ("tests/kernels/test_a.py::test_two", "FAILED"),
        ("tests/kernels/test_a.py::test_three", "SKIPPED"),
    ]


def test_all_are_dealt_and_no_hand_is_empty() -> None:
    assert split_tests(["a", "b", "c"], 2) == [["a", "c"], ["b"]]
    assert split_tests(["a"], 8) == [["a"]]


def test_one_that_crashes_loses_nothing_of_the_others(folder: Path) -> None:
    (folder / "test_file.py").write_text(FILE)
    report = run_tests(300, ["some"])
    assert report["counts"] == {"PASSED": 3, "FAILED": 1}
    assert [name.partition("::")[2] for name in report["failed"]] == ["test_fails"]
    assert [name.partition("::")[2] for name in report["unfinished"]] == ["test_crashes"]
    assert not report["complete"]


def test_packages_in_the_path_are_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "package_in_path.py").touch()
    (folder / "test_file.py").write_text("import package_in_path\ndef test_passes(): pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    assert run_tests(300, ["some"])["counts"] == {"PASSED": 1}


@pytest.mark.parametrize(("limit", "left"), [(1.0, 300.0), (300.0, 1.0)])
def test_collection_takes_no_longer_than_it_may_and_than_is_left(
    limit: float, left: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "test_file.py").write_text(SLOW)
    monkeypatch.setattr(gpu_tests, "COLLECT_SECONDS", limit)
    report = run_tests(left, ["some"])
    assert report == {"folders": ["some"], "complete": False, "error": "the tests were not collected in 1 s"}
