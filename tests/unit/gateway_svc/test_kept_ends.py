"""Ends of sequences that may not be durable yet."""

import pytest

from gateway_svc.kept_ends import KeptEnds
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1


class Clock:
    """A clock that advances only when it is set."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("gateway_svc.kept_ends.time.monotonic", lambda: clock.now)
    return clock


def ends(lengths: dict[int, int]) -> list[scheduler_v1.UnflushedTokens]:
    """Sequences that end with so many tokens, of which the last one is unflushed."""
    return [scheduler_v1.UnflushedTokens(index=i, offset=n - 1, token_ids=[7]) for i, n in lengths.items()]


def kept(kept_ends: KeptEnds) -> list[tuple[str, str, int, int]]:
    return [
        (attach.key, attach.submission_id, one.index, one.offset + len(one.token_ids))
        for attach in kept_ends
        for one in attach.unflushed
    ]


def test_they_are_kept_until_they_are_durable() -> None:
    kept_ends = KeptEnds()
    kept_ends.add("a", "s", ends({0: 3, 2: 5}))
    kept_ends.add("b", "s", ends({0: 3}))
    assert kept(kept_ends) == [("a", "s", 0, 3), ("a", "s", 2, 5), ("b", "s", 0, 3)]
    kept_ends.confirm_durable("a", scheduler_v1.Durable(index=0, num_tokens=2))
    kept_ends.confirm_durable("a", scheduler_v1.Durable(index=2, num_tokens=5))
    kept_ends.confirm_durable("unknown", scheduler_v1.Durable())
    assert kept(kept_ends) == [("a", "s", 0, 3), ("b", "s", 0, 3)]


def test_those_of_a_request_that_has_ended_are_dropped() -> None:
    kept_ends = KeptEnds()
    kept_ends.add("a", "s", ends({0: 3}))
    kept_ends.forget("a")
    kept_ends.forget("a")
    assert kept(kept_ends) == []


def test_they_expire(clock: Clock) -> None:
    kept_ends = KeptEnds()
    kept_ends.add("old", "s", ends({0: 3}))
    clock.now += 61
    kept_ends.add("new", "s", ends({0: 4}))
    assert kept(kept_ends) == [("new", "s", 0, 4)]
    clock.now += 61
    assert kept(kept_ends) == []


def test_one_that_is_added_again_expires_as_a_new_one(clock: Clock) -> None:
    kept_ends = KeptEnds()
    kept_ends.add("again", "first", ends({0: 3}))
    kept_ends.add("other", "s", ends({0: 3}))
    clock.now += 40
    kept_ends.add("again", "second", ends({0: 5}))
    clock.now += 40
    assert kept(kept_ends) == [("again", "second", 0, 5)]
