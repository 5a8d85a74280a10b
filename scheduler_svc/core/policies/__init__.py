"""Policies behind one interface, by the names that an operator gives them."""

from collections.abc import Callable, Mapping

from scheduler_svc.core.policies.base import OrderKey, Policy, PolicySettings
from scheduler_svc.core.policies.fair import FairPolicy
from scheduler_svc.core.policies.fcfs import FcfsPolicy
from scheduler_svc.core.policies.priority import PriorityPolicy

POLICIES: Mapping[str, Callable[[PolicySettings], Policy]] = {
    "fcfs": FcfsPolicy,
    "priority": PriorityPolicy,
    "fair": FairPolicy,
}

__all__ = ["POLICIES", "FairPolicy", "FcfsPolicy", "OrderKey", "Policy", "PolicySettings", "PriorityPolicy"]
