"""The interface of scheduling policies, and their settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from scheduler_svc.core.request import Sequence

OrderKey = tuple[float, float, float, int, int]
"""The running sequence with the largest key is preempted first.

Class (negated: a lower one is larger), its tenant's debt in weighted tokens, arrival in monotonic seconds, number of
its request, index within the request.
"""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of all policies. Each policy reads its own."""

    ageing_seconds: float = 10.0  # of waiting, after which a request's effective priority rises by one class
    deadline_horizon: float = 60.0  # seconds after its first token is due at which a request is due without a deadline
    short_prompts_first: bool = True  # first tokens are due by the lengths of prompts; otherwise when requests arrive

    def __post_init__(self) -> None:
        if not self.ageing_seconds > 0:
            raise ValueError("ageing_seconds must be positive")
        if not self.deadline_horizon >= 0:
            raise ValueError("deadline_horizon must not be negative")


class Policy(Protocol):
    """Holds the queued sequences; decides which is admitted next, and which running one is preempted first.

    `now` is monotonic seconds.
    """

    def __len__(self) -> int:
        """How many sequences are queued."""

    def add(self, sequence: Sequence, now: float) -> None:
        """Queues a sequence. A preempted one is ordered by its first arrival."""

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue. Does nothing if it is not queued."""

    def first(self, now: float) -> Sequence | None:
        """The sequence to admit next. It stays queued until `remove`."""

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charges the sequence's tenant for computed prompt tokens or generated tokens."""

    def preemption_key(self, sequence: Sequence) -> OrderKey:
        """Sort key of running sequences. The largest is preempted first."""

    def effective_priority(self, sequence: Sequence, now: float) -> int:
        """The class that a sequence counts as now; its own if classes do not rise with waiting."""

    def outranks(self, waiting: Sequence, running: Sequence, now: float) -> bool:
        """Whether a queued or swapped sequence takes the slot of a running one, whatever tenants they have.

        Then it must go before the running one if both wait.
        """

    def debt(self, tenant: str, priority: int | None = None) -> float:
        """How many weighted tokens a tenant has received more than the least of the tenants with queued sequences.

        Negative if it has received less than these, 0 if tokens are not counted. In the class of this priority; without
        one, in the class where the debt is largest.
        """

    def position(self, sequence: Sequence, now: float) -> int:
        """How many queued sequences would be admitted before it if nothing changed. O(n log n), for operators.

        Raises KeyError if it is not queued.
        """


@runtime_checkable
class TenantTurns(Protocol):
    """What a policy under which tenants take turns has besides."""

    def turns(self, now: float) -> Iterator[Sequence]:
        """Of each tenant in the class of `first`, the sequence to admit next, in the order of the tenants' turns.

        The queue must not change meanwhile.
        """


def arrival_order(sequence: Sequence) -> tuple[float, int, int]:
    """Arrival in monotonic seconds, then the number of the request, then the index within it."""
    return (sequence.request.arrived_at, sequence.arrival, sequence.index)
