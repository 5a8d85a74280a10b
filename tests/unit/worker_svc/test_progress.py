"""Long work is reported while it runs and when it is done; quick work is not reported."""

import re
import threading

import pytest

from worker_svc import progress as progress_module
from worker_svc.progress import progress


def test_long_work_is_reported_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "NEXT_SECONDS", 0.0)
    reported: list[str] = []
    twice = threading.Event()

    def report(line: str) -> None:
        reported.append(line)
        if len(reported) == 2:
            twice.set()

    with progress("loading", report):
        assert twice.wait(timeout=30)
    assert all(line.startswith("loading: ") for line in reported)
    assert "done" in reported[-1]


def test_the_share_that_is_done_is_reported_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "NEXT_SECONDS", 0.0)
    shares: list[float | None] = [0.756, None]
    reported: list[str] = []
    twice = threading.Event()

    def report(line: str) -> None:
        reported.append(line)
        if not shares:
            twice.set()

    with progress("loading", report, lambda: shares.pop() if shares else 1.0):
        assert twice.wait(timeout=30)
    assert [re.sub(r"\d+ s", "N s", line) for line in reported[:2]] == ["loading: N s", "loading: N s, 76%"]


def test_quick_work_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "FIRST_SECONDS", 3600.0)
    reported: list[str] = []
    with progress("loading", reported.append):
        pass
    assert reported == []


def test_a_failure_is_not_called_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "FIRST_SECONDS", 0.0)
    reported: list[str] = []
    once = threading.Event()

    def report(line: str) -> None:
        reported.append(line)
        once.set()

    def fail() -> None:
        with progress("loading", report):
            assert once.wait(timeout=30)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not any("done" in line for line in reported)
