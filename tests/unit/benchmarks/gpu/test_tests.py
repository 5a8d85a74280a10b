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


def test_outcomes_are_read_as_they_come() -> None:
    assert outcomes_in(LOG) == [
        ("tests/kernels/test_a.py::test_one[1 x 2]", "PASSED"),
        ("tests/kernels/test_a.py::test_two", "FAILED"),
        ("tests/kernels/test_a.py::test_three", "SKIPPED"),
    ]


def test_all_are_dealt_and_no_hand_is_empty() -> None:
    assert split_tests(["a", "b", "c"], 2) == [["a", "c"], ["b"]]
    assert split_tests(["a"], 8) == [["a"]]


def test_one_that_crashes_loses_nothing_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "test_file.py").write_text(FILE)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "MAX_PROCESSES", 1)
    report = run_tests(300, ["some"])
    assert report["counts"] == {"PASSED": 3, "FAILED": 1}
    assert [name.partition("::")[2] for name in report["failed"]] == ["test_fails"]
    assert [name.partition("::")[2] for name in report["unfinished"]] == ["test_crashes"]
    assert not report["complete"]
