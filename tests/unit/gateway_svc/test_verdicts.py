"""Stop strings of requests that are over."""

import pytest

from gateway_svc.verdicts import Verdicts
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1


class Clock:
    """Stands still but where it is set."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("gateway_svc.verdicts.time.monotonic", lambda: clock.now)
    return clock


def noted(verdicts: Verdicts) -> list[tuple[str, str, int, int]]:
    return [(one.key, one.submission_id, one.index, one.num_tokens) for one in verdicts]


def test_they_are_told_until_the_store_has_them() -> None:
    verdicts = Verdicts()
    verdicts.add("a", "s", {0: 3, 2: 5})
    verdicts.add("b", "s", {0: 3})
    assert noted(verdicts) == [("a", "s", 0, 3), ("a", "s", 2, 5), ("b", "s", 0, 3)]
    verdicts.settle("a", scheduler_v1.Durable(index=0, num_tokens=2))
    verdicts.settle("a", scheduler_v1.Durable(index=2, num_tokens=5))
    verdicts.settle("unknown", scheduler_v1.Durable())
    assert noted(verdicts) == [("a", "s", 0, 3), ("b", "s", 0, 3)]


def test_those_of_a_request_that_is_over_everywhere_are_forgotten() -> None:
    verdicts = Verdicts()
    verdicts.add("a", "s", {0: 3})
    verdicts.forget("a")
    verdicts.forget("a")
    assert noted(verdicts) == []


def test_they_are_not_kept_for_ever(clock: Clock) -> None:
    verdicts = Verdicts()
    verdicts.add("old", "s", {0: 3})
    clock.now += 61
    verdicts.add("new", "s", {0: 4})
    assert noted(verdicts) == [("new", "s", 0, 4)]
    clock.now += 61
    assert noted(verdicts) == []


def test_one_that_is_noted_again_is_kept_as_long_as_a_new_one(clock: Clock) -> None:
    verdicts = Verdicts()
    verdicts.add("again", "first", {0: 3})
    verdicts.add("other", "s", {0: 3})
    clock.now += 40
    verdicts.add("again", "second", {0: 5})
    clock.now += 40
    assert noted(verdicts) == [("again", "second", 0, 5)]
