"""What a tenant has waiting, by class of priority, and what it was served."""

from collections.abc import Iterator

from scheduler_svc.core.policies.base import arrival_order
from scheduler_svc.core.policies.lazy_heap import LazyHeap
from scheduler_svc.core.sequence import Sequence

Urgency = tuple[float, float, int, int]
Arrival = tuple[float, int, int]


class Queue:
    """A tenant's waiting sequences of one class: by urgency, and by arrival."""

    def __init__(self) -> None:
        self._by_urgency: LazyHeap[Sequence, Urgency] = LazyHeap()
        self._by_arrival: LazyHeap[Sequence, Arrival] = LazyHeap()

    def __len__(self) -> int:
        return len(self._by_urgency)

    def add(self, sequence: Sequence, urgency: Urgency) -> None:
        """Put a sequence in."""
        self._by_urgency.put(sequence, urgency)
        self._by_arrival.put(sequence, arrival_order(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        self._by_urgency.discard(sequence)
        self._by_arrival.discard(sequence)

    def most_urgent(self) -> Sequence | None:
        """Who goes first of this class."""
        first = self._by_urgency.first()
        return first[1] if first is not None else None

    def oldest(self) -> Sequence | None:
        """Who has waited longest, and so is the first to rise out of this class."""
        first = self._by_arrival.first()
        return first[1] if first is not None else None


class TenantQueues:
    """Its queues by class of priority, and its virtual token counter: tokens served, by their requests' weight."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.served = 0.0
        self._queues: dict[int, Queue] = {}

    @property
    def waits(self) -> bool:
        """Whether anything of it waits."""
        return bool(self._queues)

    def add(self, priority: int, sequence: Sequence, urgency: Urgency) -> None:
        """Let a sequence wait in a class."""
        self._queues.setdefault(priority, Queue()).add(sequence, urgency)

    def remove(self, priority: int, sequence: Sequence) -> None:
        """A sequence waits no more."""
        queue = self._queues[priority]
        queue.remove(sequence)
        if not queue:
            del self._queues[priority]

    def waits_in(self, priority: int) -> bool:
        """Whether a sequence of this class waits."""
        return priority in self._queues

    def most_urgent(self, priority: int) -> Sequence | None:
        """Who goes first of this class."""
        queue = self._queues.get(priority)
        return queue.most_urgent() if queue is not None else None

    def oldest_below(self, priority: int) -> Iterator[tuple[int, Sequence]]:
        """Of each class below this one, the class and who has waited longest."""
        for other, queue in self._queues.items():
            if other < priority and (oldest := queue.oldest()) is not None:
                yield other, oldest
