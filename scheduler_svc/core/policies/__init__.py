"""The import path of policies for packages that were written before `scheduler_svc.core.policy`."""

from scheduler_svc.core.policy import POLICIES, FairPolicy, FcfsPolicy, OrderKey, Policy, PolicySettings, PriorityPolicy

__all__ = ["POLICIES", "FairPolicy", "FcfsPolicy", "OrderKey", "Policy", "PolicySettings", "PriorityPolicy"]
