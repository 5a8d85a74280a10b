"""Policies whose order does not change while sequences wait: one heap, and no accounts of tenants."""

from collections.abc import Callable

from scheduler_svc.core.lazy_heap import LazyHeap
from scheduler_svc.core.policy.order import OrderKey, arrival_order
from scheduler_svc.core.request import Sequence


class StaticPolicy:
    """The smallest rank is admitted first, the largest preempted first; equal ranks by arrival. O(log n) each."""

    def __init__(self, rank: Callable[[Sequence], float]) -> None:
        self._rank = rank
        self._waiting: LazyHeap[Sequence, OrderKey] = LazyHeap()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, now: float) -> None:
        self._waiting.put(sequence, self.preemption_key(sequence))

    def remove(self, sequence: Sequence) -> None:
        self._waiting.discard(sequence)

    def first(self, now: float) -> Sequence | None:
        first = self._waiting.first()
        return first[1] if first is not None else None

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Does nothing: tokens are not counted."""

    def preemption_key(self, sequence: Sequence) -> OrderKey:
        """The order of the queue, reversed: the last one to be admitted is preempted first."""
        return (self._rank(sequence), 0.0, *arrival_order(sequence))

    def effective_priority(self, sequence: Sequence, now: float) -> int:
        return sequence.request.priority

    def outranks(self, waiting: Sequence, running: Sequence, now: float) -> bool:
        return False

    def debt(self, tenant: str, priority: int | None = None) -> float:
        return 0.0

    def position(self, sequence: Sequence, now: float) -> int:
        """O(n)."""
        if sequence not in self._waiting:
            raise KeyError(sequence.id)
        mine = self.preemption_key(sequence)
        return sum(self.preemption_key(other) < mine for other in self._waiting)
