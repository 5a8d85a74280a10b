"""The import path of `StaticPolicy` for packages that were written before `scheduler_svc.core.policy`."""

from scheduler_svc.core.policy.static import StaticPolicy

__all__ = ["StaticPolicy"]
