"""Who waits for what another sequence computes."""

from scheduler_svc.core.prefix_waiters import PrefixWaiters
from scheduler_svc.core.sequence import Request, Sequence


def sequence(number: int) -> Sequence:
    return Sequence(number, Request(str(number), [1], 1, 1), 0, number, [1])


class Bench:
    """A leader, and two who wait for it: one needs its first 8 tokens, the other one 16."""

    def __init__(self) -> None:
        self.leader, self.near, self.far = (sequence(number) for number in range(3))
        self.waiting = PrefixWaiters()
        self.waiting.add(self.leader, 8, self.near)
        self.waiting.add(self.leader, 16, self.far)

    def ready(self, num_committed: int) -> list[Sequence]:
        """Who is let go when the leader has come so far."""
        self.leader.num_committed = num_committed
        return list(self.waiting.take_ready(self.leader))


def test_each_waits_for_as_much_as_it_shares() -> None:
    bench = Bench()
    assert bench.ready(7) == []
    assert bench.ready(8) == [bench.near]
    assert bench.waiting.leader_of(bench.near) is None
    assert bench.waiting.leader_of(bench.far) is bench.leader
    assert bench.ready(100) == [bench.far]
    assert not bench.waiting.has_waiters(bench.leader)


def test_all_are_let_go_when_the_leader_computes_no_further() -> None:
    bench = Bench()
    assert list(bench.waiting.take_all(bench.leader)) == [bench.near, bench.far]
    assert len(bench.waiting) == 0
    assert not bench.waiting.has_waiters(bench.leader)


def test_one_that_ends_is_not_let_go_later() -> None:
    bench = Bench()
    bench.waiting.remove(bench.near)
    assert len(bench.waiting) == 1
    assert list(bench.waiting.take_all(bench.leader)) == [bench.far]


def test_nobody_leads_once_the_last_follower_has_ended() -> None:
    bench = Bench()
    bench.waiting.remove(bench.near)
    bench.waiting.remove(bench.far)
    assert not bench.waiting.has_waiters(bench.leader)


def test_one_whom_nobody_follows_lets_nobody_go() -> None:
    bench = Bench()
    assert list(bench.waiting.take_all(bench.near)) == []
    assert list(bench.waiting.take_ready(bench.near)) == []
    assert len(bench.waiting) == 2
