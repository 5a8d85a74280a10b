"""First come, first served: by arrival alone. Nobody goes before who came later."""

from scheduler_svc.core.policies.base import PolicySettings
from scheduler_svc.core.policies.static import StaticPolicy


class FcfsPolicy(StaticPolicy):
    """By arrival. Priorities, tenants and deadlines do not matter."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(lambda sequence: 0.0)
