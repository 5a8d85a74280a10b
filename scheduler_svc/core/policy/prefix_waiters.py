"""Sequences that wait for another one to compute a prefix that they share, instead of computing it twice."""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_svc.core.request import Sequence


@dataclass(frozen=True, slots=True)
class _PrefixWaiter:
    sequence: Sequence
    num_tokens: int


class PrefixWaiters:
    """By leader, the sequences that wait until its first `num_tokens` tokens are committed."""

    def __init__(self) -> None:
        self._by_leader: dict[int, list[_PrefixWaiter]] = {}
        self._leaders: dict[int, Sequence] = {}  # by id of the sequence that waits

    def __len__(self) -> int:
        return len(self._leaders)

    def has_waiters(self, leader: Sequence) -> bool:
        """Whether any sequence waits for this one."""
        return leader.id in self._by_leader

    def add(self, leader: Sequence, num_tokens: int, sequence: Sequence) -> None:
        """Have a sequence wait."""
        self._by_leader.setdefault(leader.id, []).append(_PrefixWaiter(sequence, num_tokens))
        self._leaders[sequence.id] = leader

    def leader_of(self, sequence: Sequence) -> Sequence | None:
        """The sequence that this one waits for."""
        return self._leaders.get(sequence.id)

    def remove(self, sequence: Sequence) -> None:
        """A sequence waits no more."""
        leader = self._leaders.pop(sequence.id)
        self._keep(leader, [waiter for waiter in self._by_leader[leader.id] if waiter.sequence is not sequence])

    def take_ready(self, leader: Sequence) -> Iterator[Sequence]:
        """Remove and yield the sequences for which the leader has committed enough tokens."""
        waiters = self._by_leader.get(leader.id)
        if waiters is None:
            return
        self._keep(leader, [waiter for waiter in waiters if waiter.num_tokens > leader.num_committed])
        for waiter in waiters:
            if waiter.num_tokens <= leader.num_committed:
                del self._leaders[waiter.sequence.id]
                yield waiter.sequence

    def take_all(self, leader: Sequence) -> Iterator[Sequence]:
        """Remove and yield all sequences that wait for a leader."""
        for waiter in self._by_leader.pop(leader.id, ()):
            del self._leaders[waiter.sequence.id]
            yield waiter.sequence

    def _keep(self, leader: Sequence, waiters: list[_PrefixWaiter]) -> None:
        if waiters:
            self._by_leader[leader.id] = waiters
        else:
            self._by_leader.pop(leader.id, None)
