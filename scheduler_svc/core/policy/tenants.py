"""A tenant's queued sequences by class of priority, and the tokens that it has received."""

from collections.abc import Iterator

from scheduler_svc.core.lazy_heap import LazyHeap
from scheduler_svc.core.policy.order import arrival_order
from scheduler_svc.core.request import Sequence

Urgency = tuple[float, float, int, int]
Arrival = tuple[float, int, int]


class Queue:
    """A tenant's queued sequences of one class, by urgency and by how long they have waited."""

    def __init__(self) -> None:
        self._by_urgency: LazyHeap[Sequence, Urgency] = LazyHeap()
        self._by_age: LazyHeap[Sequence, Arrival] = LazyHeap()

    def __len__(self) -> int:
        return len(self._by_urgency)

    def add(self, sequence: Sequence, urgency: Urgency) -> None:
        self._by_urgency.put(sequence, urgency)
        self._by_age.put(sequence, (sequence.ages_from, *arrival_order(sequence)[1:]))

    def remove(self, sequence: Sequence) -> None:
        self._by_urgency.discard(sequence)
        self._by_age.discard(sequence)

    def most_urgent(self) -> Sequence | None:
        """The sequence of this class that is admitted first."""
        first = self._by_urgency.first()
        return first[1] if first is not None else None

    def oldest(self) -> Sequence | None:
        """The sequence that has waited longest, and rises out of this class first."""
        first = self._by_age.first()
        return first[1] if first is not None else None


class TenantQueues:
    """A tenant's queues by class of priority, and its virtual token counter: tokens over their request's weight."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.served = 0.0
        self.charged_at = 0  # which charge, of all tenants, was its last one
        self.used_at = 0.0  # when a sequence of it left the queue or was charged last, in seconds
        self._queues: dict[int, Queue] = {}

    @property
    def waits(self) -> bool:
        """Whether any sequence of it is queued."""
        return bool(self._queues)

    def add(self, priority: int, sequence: Sequence, urgency: Urgency) -> None:
        self._queues.setdefault(priority, Queue()).add(sequence, urgency)

    def remove(self, priority: int, sequence: Sequence) -> None:
        queue = self._queues[priority]
        queue.remove(sequence)
        if not queue:
            del self._queues[priority]

    def waits_in(self, priority: int) -> bool:
        """Whether a sequence of this class is queued."""
        return priority in self._queues

    def most_urgent(self, priority: int) -> Sequence | None:
        """The sequence of this class that is admitted first."""
        queue = self._queues.get(priority)
        return queue.most_urgent() if queue is not None else None

    def oldest_below(self, priority: int) -> Iterator[tuple[int, Sequence]]:
        """Of each class below this one, the class and the sequence that has waited longest."""
        for other, queue in self._queues.items():
            if other < priority and (oldest := queue.oldest()) is not None:
                yield other, oldest
