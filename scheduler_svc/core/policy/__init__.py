"""Scheduling policies, by the names in the scheduler's settings."""

from collections.abc import Callable, Mapping

from scheduler_svc.core.policy.fair import FairPolicy
from scheduler_svc.core.policy.fcfs import FcfsPolicy
from scheduler_svc.core.policy.order import OrderKey, Policy, PolicySettings
from scheduler_svc.core.policy.priority import PriorityPolicy

POLICIES: Mapping[str, Callable[[PolicySettings], Policy]] = {
    "fcfs": FcfsPolicy,
    "priority": PriorityPolicy,
    "fair": FairPolicy,
}

__all__ = ["POLICIES", "FairPolicy", "FcfsPolicy", "OrderKey", "Policy", "PolicySettings", "PriorityPolicy"]
