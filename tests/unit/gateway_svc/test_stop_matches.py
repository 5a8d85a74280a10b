"""Stop strings of requests that have ended."""

import pytest

from gateway_svc.stop_matches import StopMatches
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1


class Clock:
    """A clock that advances only when it is set."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("gateway_svc.stop_matches.time.monotonic", lambda: clock.now)
    return clock


def kept(stop_matches: StopMatches) -> list[tuple[str, str, int, int]]:
    return [(one.key, one.submission_id, one.index, one.num_tokens) for one in stop_matches]


def test_they_are_kept_until_they_are_durable() -> None:
    stop_matches = StopMatches()
    stop_matches.add("a", "s", {0: 3, 2: 5})
    stop_matches.add("b", "s", {0: 3})
    assert kept(stop_matches) == [("a", "s", 0, 3), ("a", "s", 2, 5), ("b", "s", 0, 3)]
    stop_matches.confirm_durable("a", scheduler_v1.Durable(index=0, num_tokens=2))
    stop_matches.confirm_durable("a", scheduler_v1.Durable(index=2, num_tokens=5))
    stop_matches.confirm_durable("unknown", scheduler_v1.Durable())
    assert kept(stop_matches) == [("a", "s", 0, 3), ("b", "s", 0, 3)]


def test_those_of_a_request_that_has_ended_are_dropped() -> None:
    stop_matches = StopMatches()
    stop_matches.add("a", "s", {0: 3})
    stop_matches.forget("a")
    stop_matches.forget("a")
    assert kept(stop_matches) == []


def test_they_expire(clock: Clock) -> None:
    stop_matches = StopMatches()
    stop_matches.add("old", "s", {0: 3})
    clock.now += 61
    stop_matches.add("new", "s", {0: 4})
    assert kept(stop_matches) == [("new", "s", 0, 4)]
    clock.now += 61
    assert kept(stop_matches) == []


def test_one_that_is_added_again_expires_as_a_new_one(clock: Clock) -> None:
    stop_matches = StopMatches()
    stop_matches.add("again", "first", {0: 3})
    stop_matches.add("other", "s", {0: 3})
    clock.now += 40
    stop_matches.add("again", "second", {0: 5})
    clock.now += 40
    assert kept(stop_matches) == [("again", "second", 0, 5)]
