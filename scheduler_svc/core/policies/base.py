"""What every scheduling policy does, and what it can be told."""

from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.sequence import Sequence

# Among running sequences the largest gives way first: class (negated: a lower one is larger), debt of its tenant in
# weighted tokens, arrival in monotonic seconds, number of its request, index within it.
OrderKey = tuple[float, float, float, int, int]


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Seconds that policies count in. Each policy reads what concerns it."""

    ageing_seconds: float = 10.0  # of waiting, that make up for one class of priority
    deadline_horizon: float = 60.0  # a request without a deadline counts as if it were due so long after its arrival

    def __post_init__(self) -> None:
        if not self.ageing_seconds > 0:
            raise ValueError("ageing_seconds must be positive")
        if not self.deadline_horizon >= 0:
            raise ValueError("deadline_horizon must not be negative")


class Policy(Protocol):
    """Who goes first, and who gives way. Holds the sequences that wait. `now` is monotonic seconds."""

    def __len__(self) -> int:
        """Sequences that wait."""

    def add(self, sequence: Sequence, now: float) -> None:
        """It waits from now on. One that waits again, having given way, has the place that its arrival gives it."""

    def remove(self, sequence: Sequence) -> None:
        """It waits no more: it was admitted or parked, or has ended. No harm if it did not wait."""

    def first(self, now: float) -> Sequence | None:
        """Who goes first; it goes on waiting until it is removed."""

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Its tenant was served so many tokens, computed ones of a prompt or generated ones."""

    def preemption_key(self, sequence: Sequence) -> OrderKey:
        """A key among running sequences: the largest is the first victim."""

    def effective_priority(self, sequence: Sequence, now: float) -> int:
        """The class that it counts as now, after all its waiting; its own where the policy has no classes that rise."""

    def debt(self, tenant: str, priority: int | None = None) -> float:
        """How far the tenant is ahead of the one that was served least, in weighted tokens; 0 where none is counted.

        In the class of this priority; in the one where it owes most, where none is named.
        """

    def position(self, sequence: Sequence, now: float) -> int:
        """How many would go before it if nothing came, and nothing were charged. O(n log n): for a person who asks.

        Raises KeyError where it does not wait.
        """


def arrival_order(sequence: Sequence) -> tuple[float, int, int]:
    """Arrival in monotonic seconds, then the number of the request, then the index within it."""
    return (sequence.request.arrived_at, sequence.arrival, sequence.index)
