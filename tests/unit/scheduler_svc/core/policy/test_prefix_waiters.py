"""Sequences that wait for a prefix that another one computes."""

from scheduler_svc.core.policy.prefix_waiters import PrefixWaiters
from scheduler_svc.core.request import Request, Sequence


def sequence(number: int) -> Sequence:
    return Sequence(number, Request(str(number), [1], 1, 1), 0, number, [1])


class Bench:
    """A leader, and two sequences that wait for it: for its first 8 tokens, and for its first 16."""

    def __init__(self) -> None:
        self.leader, self.near, self.far = (sequence(number) for number in range(3))
        self.waiting = PrefixWaiters()
        self.waiting.add(self.leader, 8, self.near)
        self.waiting.add(self.leader, 16, self.far)

    def ready(self, num_committed: int) -> list[Sequence]:
        """The sequences that are released when the leader has committed so many tokens."""
        self.leader.num_committed = num_committed
        return list(self.waiting.take_ready(self.leader))


def test_each_waits_for_the_prefix_that_it_shares() -> None:
    bench = Bench()
    assert bench.ready(7) == []
    assert bench.ready(8) == [bench.near]
    assert bench.waiting.leader_of(bench.near) is None
    assert bench.waiting.leader_of(bench.far) is bench.leader
    assert bench.ready(100) == [bench.far]
    assert not bench.waiting.has_waiters(bench.leader)


def test_all_are_released_when_the_leader_stops_computing() -> None:
    bench = Bench()
    assert list(bench.waiting.take_all(bench.leader)) == [bench.near, bench.far]
    assert len(bench.waiting) == 0
    assert not bench.waiting.has_waiters(bench.leader)


def test_removed_sequence_is_not_released_later() -> None:
    bench = Bench()
    bench.waiting.remove(bench.near)
    assert len(bench.waiting) == 1
    assert list(bench.waiting.take_all(bench.leader)) == [bench.far]


def test_leader_has_no_waiters_once_the_last_one_is_removed() -> None:
    bench = Bench()
    bench.waiting.remove(bench.near)
    bench.waiting.remove(bench.far)
    assert not bench.waiting.has_waiters(bench.leader)


def test_sequence_without_waiters_releases_none() -> None:
    bench = Bench()
    assert list(bench.waiting.take_all(bench.near)) == []
    assert list(bench.waiting.take_ready(bench.near)) == []
    assert len(bench.waiting) == 2
