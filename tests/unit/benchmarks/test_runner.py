"""Turns, medians, and how a benchmark ends."""

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.processes import BenchmarkFailed
from benchmarks.record import read_result
from benchmarks.report import Cells, Sense, target
from benchmarks.runner import failures_exit, in_turns, median_of, publish


@dataclass(frozen=True)
class Inner:
    p50: float


@dataclass(frozen=True)
class Run:
    name: str
    count: int
    seconds: float
    inner: Inner


def test_each_run_starts_with_another_case() -> None:
    assert list(in_turns("abc", 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]


def test_a_median_is_of_each_number_by_itself() -> None:
    runs = [Run("x", 3, 1.0, Inner(9.0)), Run("x", 3, 4.0, Inner(7.0)), Run("x", 3, 2.0, Inner(8.0))]
    assert median_of(runs) == Run("x", 3, 2.0, Inner(8.0))


@pytest.mark.parametrize(("error", "status"), [(BenchmarkFailed("why"), "name: why"), (KeyboardInterrupt(), 130)])
def test_an_expected_failure_ends_the_program(error: BaseException, status: str | int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, failures_exit("name"):
        raise error
    assert ended.value.code == status
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_unexpected_error_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), failures_exit("name"):
        raise ZeroDivisionError


def test_a_result_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"targets": [target("share", 0.5, Sense.AT_LEAST, 0.4)]}
    publish(result, None, {"A title": Cells(("a", "b"), [("1", "2")])})
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("A title", "share: 0.5, target ≥ 0.4"))
    publish(result, tmp_path / "result.json", {})
    assert read_result(tmp_path / "result.json") == result
