"""Sequences that wait for another one to compute what they share, instead of computing it a second time."""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_svc.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _PrefixWaiter:
    sequence: Sequence
    num_tokens: int


class PrefixWaiters:
    """By leader, who waits until its first `num_tokens` tokens are computed and committed."""

    def __init__(self) -> None:
        self._by_leader: dict[int, list[_PrefixWaiter]] = {}
        self._leaders: dict[int, Sequence] = {}  # by follower's id

    def has_waiters(self, sequence: Sequence) -> bool:
        """Whether anybody waits for this one."""
        return sequence.id in self._by_leader

    def __len__(self) -> int:
        return len(self._leaders)

    def add(self, leader: Sequence, num_tokens: int, sequence: Sequence) -> None:
        """Let a sequence wait."""
        self._by_leader.setdefault(leader.id, []).append(_PrefixWaiter(sequence, num_tokens))
        self._leaders[sequence.id] = leader

    def leader_of(self, sequence: Sequence) -> Sequence | None:
        """Whom a sequence waits for."""
        return self._leaders.get(sequence.id)

    def remove(self, sequence: Sequence) -> None:
        """A sequence waits no more."""
        leader = self._leaders.pop(sequence.id)
        rest = [one for one in self._by_leader[leader.id] if one.sequence is not sequence]
        self._keep(leader, rest)

    def take_ready(self, leader: Sequence) -> Iterator[Sequence]:
        """Those who need wait no longer, as far as the leader is committed now."""
        followers = self._by_leader.get(leader.id)
        if followers is None:
            return
        self._keep(leader, [one for one in followers if one.num_tokens > leader.num_committed])
        for one in followers:
            if one.num_tokens <= leader.num_committed:
                del self._leaders[one.sequence.id]
                yield one.sequence

    def take_all(self, leader: Sequence) -> Iterator[Sequence]:
        """All who wait for a leader, since it computes no further."""
        for one in self._by_leader.pop(leader.id, ()):
            del self._leaders[one.sequence.id]
            yield one.sequence

    def _keep(self, leader: Sequence, followers: list[_PrefixWaiter]) -> None:
        if followers:
            self._by_leader[leader.id] = followers
        else:
            self._by_leader.pop(leader.id, None)
