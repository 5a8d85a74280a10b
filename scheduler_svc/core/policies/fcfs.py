"""First come, first served: by arrival alone. Nobody goes before who came later."""

from scheduler_svc.core.policies.base import PolicySettings
from scheduler_svc.core.policies.static import StaticPolicy
from scheduler_svc.core.sequence import Sequence


class FcfsPolicy(StaticPolicy):
    """By arrival. Priorities, tenants and deadlines do not matter."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(lambda sequence: sequence.request.arrived_at)

    def effective_priority(self, sequence: Sequence, now: float) -> int:
        """See Policy. There is one class."""
        return 0
