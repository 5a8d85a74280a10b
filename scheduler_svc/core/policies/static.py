"""Policies whose order never changes while sequences wait: one heap, no account of who was served."""

from collections.abc import Callable

from scheduler_svc.core.policies.base import OrderKey, arrival_order
from scheduler_svc.core.policies.lazy_heap import LazyHeap
from scheduler_svc.core.sequence import Sequence


class StaticPolicy:
    """The smallest rank goes first and the largest gives way; equal ones go by arrival. Everything is O(log n)."""

    def __init__(self, rank: Callable[[Sequence], float]) -> None:
        self._rank = rank
        self._waiting: LazyHeap[Sequence, OrderKey] = LazyHeap()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, now: float) -> None:
        """See Policy."""
        self._waiting.put(sequence, self.preemption_key(sequence))

    def remove(self, sequence: Sequence) -> None:
        """See Policy."""
        self._waiting.discard(sequence)

    def first(self, now: float) -> Sequence | None:
        """See Policy."""
        first = self._waiting.first()
        return first[1] if first is not None else None

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """See Policy; nobody's tokens are counted."""

    def preemption_key(self, sequence: Sequence) -> OrderKey:
        """See Policy. The order of the queue turned round: who would go last gives way first."""
        return (self._rank(sequence), 0.0, *arrival_order(sequence))

    def effective_priority(self, sequence: Sequence, now: float) -> int:
        """See Policy."""
        return sequence.request.priority

    def debt(self, tenant: str, priority: int | None = None) -> float:
        """See Policy."""
        return 0.0

    def position(self, sequence: Sequence, now: float) -> int:
        """See Policy. O(n)."""
        if sequence not in self._waiting:
            raise KeyError(sequence.id)
        mine = self.preemption_key(sequence)
        return sum(self.preemption_key(other) < mine for other in self._waiting)
