"""Sequences that wait for another one to compute a prefix that they share, instead of computing it twice."""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_svc.core.request import Sequence


@dataclass(frozen=True, slots=True)
class _PrefixWaiter:
    sequence: Sequence
    num_tokens: int


class PrefixWaiters:
    """Sequences that wait until a prefix is committed, by its *producer*: the sequence that computes it."""

    def __init__(self) -> None:
        self._by_producer: dict[int, list[_PrefixWaiter]] = {}
        self._producers: dict[int, Sequence] = {}  # by id of the sequence that waits

    def __len__(self) -> int:
        return len(self._producers)

    def has_waiters(self, producer: Sequence) -> bool:
        """Whether any sequence waits for this one."""
        return producer.id in self._by_producer

    def add(self, producer: Sequence, num_tokens: int, sequence: Sequence) -> None:
        """Has a sequence wait."""
        self._by_producer.setdefault(producer.id, []).append(_PrefixWaiter(sequence, num_tokens))
        self._producers[sequence.id] = producer

    def producer_of(self, sequence: Sequence) -> Sequence | None:
        """The sequence that this one waits for."""
        return self._producers.get(sequence.id)

    def remove(self, sequence: Sequence) -> None:
        """A sequence waits no more."""
        producer = self._producers.pop(sequence.id)
        self._keep(producer, [waiter for waiter in self._by_producer[producer.id] if waiter.sequence is not sequence])

    def take_ready(self, producer: Sequence) -> Iterator[Sequence]:
        """Removes and yields the sequences for which the producer has committed enough tokens."""
        waiters = self._by_producer.get(producer.id)
        if waiters is None:
            return
        self._keep(producer, [waiter for waiter in waiters if waiter.num_tokens > producer.num_committed])
        for waiter in waiters:
            if waiter.num_tokens <= producer.num_committed:
                del self._producers[waiter.sequence.id]
                yield waiter.sequence

    def take_all(self, producer: Sequence) -> Iterator[Sequence]:
        """Removes and yields all sequences that wait for a producer."""
        for waiter in self._by_producer.pop(producer.id, ()):
            del self._producers[waiter.sequence.id]
            yield waiter.sequence

    def _keep(self, producer: Sequence, waiters: list[_PrefixWaiter]) -> None:
        if waiters:
            self._by_producer[producer.id] = waiters
        else:
            self._by_producer.pop(producer.id, None)
