"""Priorities with linear ageing: waiting makes up for class, at a fixed rate."""

from scheduler_svc.core.policies.base import PolicySettings
from scheduler_svc.core.policies.static import StaticPolicy
from scheduler_svc.core.sequence import Sequence

_HIGHEST = 2**31 - 1  # that a request can ask for


class PriorityPolicy(StaticPolicy):
    """By arrival less priority × ageing_seconds: as if each class of priority had come so much earlier.

    The rank holds still while a sequence waits, since all that wait age alike. The bound: no request goes before one
    of lower priority that came more than (difference of their priorities) × ageing_seconds before it.
    """

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self._ageing_seconds = (settings or PolicySettings()).ageing_seconds
        super().__init__(self._virtual_arrival)

    def effective_priority(self, sequence: Sequence, now: float) -> int:
        """See Policy. One more for each ageing_seconds since it came."""
        request = sequence.request
        risen = max(0, int((now - request.arrived_at) / self._ageing_seconds))
        return min(request.priority + risen, _HIGHEST)

    def _virtual_arrival(self, sequence: Sequence) -> float:
        return sequence.request.arrived_at - sequence.request.priority * self._ageing_seconds
