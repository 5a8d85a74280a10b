"""First come, first served."""

from scheduler_svc.core.policy.order import PolicySettings
from scheduler_svc.core.policy.static import StaticPolicy
from scheduler_svc.core.request import Sequence


class FcfsPolicy(StaticPolicy):
    """By arrival. Ignores priorities, tenants and deadlines."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(lambda sequence: sequence.request.arrived_at)

    def effective_priority(self, sequence: Sequence, now: float) -> int:
        """There is one class."""
        return 0
