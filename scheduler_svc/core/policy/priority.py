"""Priorities with linear ageing: a request's effective priority rises at a fixed rate while it waits."""

from scheduler_svc.core.policy.order import PolicySettings
from scheduler_svc.core.policy.static import StaticPolicy
from scheduler_svc.core.request import Sequence

_HIGHEST = 2**31 - 1  # priority of a request


class PriorityPolicy(StaticPolicy):
    """Orders by arrival minus priority × ageing_seconds.

    The rank is constant while a sequence waits, since all age at the same rate. A request is never admitted before one
    of lower priority that arrived more than (difference of their priorities) × ageing_seconds earlier.
    """

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self._ageing_seconds = (settings or PolicySettings()).ageing_seconds
        super().__init__(self._virtual_arrival)

    def effective_priority(self, sequence: Sequence, now: float) -> int:
        """One class more for each ageing_seconds since its arrival."""
        request = sequence.request
        num_classes = max(0, int((now - request.arrived_at) / self._ageing_seconds))
        return min(request.priority + num_classes, _HIGHEST)

    def outranks(self, waiting: Sequence, running: Sequence, now: float) -> bool:
        """One of a higher priority that precedes it."""
        is_higher = waiting.request.priority > running.request.priority
        return is_higher and self._virtual_arrival(waiting) < self._virtual_arrival(running)

    def _virtual_arrival(self, sequence: Sequence) -> float:
        return sequence.request.arrived_at - sequence.request.priority * self._ageing_seconds
