"""Bounds and policies of a scheduler's core."""

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.policy import Policy, PolicySettings
from scheduler_svc.core.policy.preemption import PreemptionMode

MAX_STEPS_IN_FLIGHT = 2  # per replica: one runs while the next one is made


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step, if lower than the worker's; bounds of the queue; the policies.

    A chunk of a long prompt makes a step at most about `gap_factor` times as long as its decodes alone would take,
    unless its first token would be late.
    """

    max_step_tokens: int = 2**31
    max_sequences: int = 2**31
    queue: AdmissionLimits = field(default_factory=AdmissionLimits)
    policy: str = "fair"
    make_policy: Callable[[PolicySettings], Policy] | None = None
    """Makes the policy of that name; None for a built-in one."""
    policy_settings: PolicySettings = field(default_factory=PolicySettings)
    gap_factor: float = 1.5
    preemption: PreemptionMode = PreemptionMode.AUTO
