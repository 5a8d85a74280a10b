"""Sequences that wait for a prefix that another one computes."""

from scheduler_svc.core.policy.prefix_waiters import PrefixWaiters
from scheduler_svc.core.request import Request, Sequence


def sequence(number: int) -> Sequence:
    return Sequence(number, Request(str(number), [1], 1, 1), 0, number, [1])


class Bench:
    """A producer, and two sequences that wait for it: for its first 8 tokens, and for its first 16."""

    def __init__(self) -> None:
        self.producer, self.near, self.far = (sequence(number) for number in range(3))
        self.waiting = PrefixWaiters()
        self.waiting.add(self.producer, 8, self.near)
        self.waiting.add(self.producer, 16, self.far)

    def ready(self, num_committed: int) -> list[Sequence]:
        """The sequences that are released when the producer has committed so many tokens."""
        self.producer.num_committed = num_committed
        return list(self.waiting.take_ready(self.producer))


def test_each_waits_for_the_prefix_that_it_shares() -> None:
    bench = Bench()
    assert bench.ready(7) == []
    assert bench.ready(8) == [bench.near]
    assert bench.waiting.producer_of(bench.near) is None
    assert bench.waiting.producer_of(bench.far) is bench.producer
    assert bench.ready(100) == [bench.far]
    assert not bench.waiting.has_waiters(bench.producer)


def test_all_are_released_when_the_producer_stops_computing() -> None:
    bench = Bench()
    assert list(bench.waiting.take_all(bench.producer)) == [bench.near, bench.far]
    assert len(bench.waiting) == 0
    assert not bench.waiting.has_waiters(bench.producer)


def test_removed_sequence_is_not_released_later() -> None:
    bench = Bench()
    bench.waiting.remove(bench.near)
    assert len(bench.waiting) == 1
    assert list(bench.waiting.take_all(bench.producer)) == [bench.far]


def test_producer_has_no_waiters_once_the_last_one_is_removed() -> None:
    bench = Bench()
    bench.waiting.remove(bench.near)
    bench.waiting.remove(bench.far)
    assert not bench.waiting.has_waiters(bench.producer)


def test_sequence_without_waiters_releases_none() -> None:
    bench = Bench()
    assert list(bench.waiting.take_all(bench.near)) == []
    assert list(bench.waiting.take_ready(bench.near)) == []
    assert len(bench.waiting) == 2
