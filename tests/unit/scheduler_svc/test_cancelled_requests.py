"""Which submissions were cancelled of late."""

from scheduler_svc.cancelled_requests import CancelledRequests


def test_a_submission_is_known_for_a_minute_until_the_next_one() -> None:
    now = 0.0
    cancelled = CancelledRequests(lambda: now)
    cancelled.add("k", "a")
    assert cancelled.has("k", "a")
    assert not cancelled.has("k", "b")
    assert not cancelled.has("l", "a")
    cancelled.forget("k")
    assert not cancelled.has("k", "a")
    cancelled.add("k", "b")
    now = 61.0
    assert not cancelled.has("k", "b")


def test_where_the_submission_is_not_known_every_one_counts() -> None:
    cancelled = CancelledRequests()
    cancelled.add("k", "")
    assert cancelled.has("k", "a")


def test_old_ones_and_the_oldest_of_too_many_are_dropped() -> None:
    now = 0.0
    cancelled = CancelledRequests(lambda: now)
    for number in range(10_001):
        cancelled.add(f"{number}", "a")
    assert not cancelled.has("0", "a")
    assert cancelled.has("1", "a")
    now = 61.0
    cancelled.add("k", "a")
    assert len(cancelled._kept) == 1
