"""What takes long is told while it lasts and once it is done; what does not is not told at all."""

import threading

import pytest

from worker_svc import progress as progress_module
from worker_svc.progress import progress


def test_what_takes_long_is_told_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "NEXT_SECONDS", 0.0)
    told: list[str] = []
    twice = threading.Event()

    def report(line: str) -> None:
        told.append(line)
        if len(told) == 2:
            twice.set()

    with progress("loading", report):
        assert twice.wait(timeout=30)
    assert all(line.startswith("loading: ") for line in told)
    assert "done" in told[-1]


def test_what_is_quick_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "FIRST_SECONDS", 3600.0)
    told: list[str] = []
    with progress("loading", told.append):
        pass
    assert told == []


def test_a_failure_is_not_called_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "FIRST_SECONDS", 0.0)
    told: list[str] = []
    once = threading.Event()

    def report(line: str) -> None:
        told.append(line)
        once.set()

    def fail() -> None:
        with progress("loading", report):
            assert once.wait(timeout=30)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not any("done" in line for line in told)
