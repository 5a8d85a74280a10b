"""Stop strings of requests that are over."""

import pytest

from gateway_svc.verdicts import Verdicts
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1


def noted(verdicts: Verdicts) -> list[tuple[str, int, int]]:
    return [(one.key, one.index, one.num_tokens) for one in verdicts]


def test_they_are_told_until_the_store_has_them() -> None:
    verdicts = Verdicts()
    verdicts.add("a", {0: 3, 2: 5})
    verdicts.add("b", {0: 3})
    assert noted(verdicts) == [("a", 0, 3), ("a", 2, 5), ("b", 0, 3)]
    verdicts.settle("a", scheduler_v1.Durable(index=0, num_tokens=2))
    verdicts.settle("a", scheduler_v1.Durable(index=2, num_tokens=5))
    verdicts.settle("unknown", scheduler_v1.Durable())
    assert noted(verdicts) == [("a", 0, 3), ("b", 0, 3)]


def test_they_are_not_told_to_another_request_of_that_name() -> None:
    verdicts = Verdicts()
    verdicts.add("a", {0: 3})
    verdicts.forget("a")
    verdicts.forget("a")
    assert noted(verdicts) == []


def test_they_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("gateway_svc.verdicts.time.monotonic", lambda: now)
    verdicts = Verdicts()
    verdicts.add("old", {0: 3})
    now += 61
    verdicts.add("new", {0: 4})
    assert noted(verdicts) == [("new", 0, 4)]
