"""Policies of other packages may import from where the core had its policies before."""

import importlib

from scheduler_svc.core import policies, policy
from scheduler_svc.core.policy.static import StaticPolicy


def test_names_are_those_of_the_policy_package() -> None:
    assert set(policies.__all__) == set(policy.__all__)
    assert all(getattr(policies, name) is getattr(policy, name) for name in policy.__all__)
    assert importlib.import_module("scheduler_svc.core.policies.static").StaticPolicy is StaticPolicy
