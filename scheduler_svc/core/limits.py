"""What a scheduler is told, and what it counts."""

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.policies import Policy, PolicySettings
from scheduler_svc.core.preemption import PreemptionMode


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold, where that is less than its worker holds; what may wait; who goes first or gives way.

    A step with a part of a long prompt takes no more than about `gap_factor` times as long as the decodes in it alone.
    """

    max_step_tokens: int = 2**31
    max_sequences: int = 2**31
    queue: AdmissionLimits = field(default_factory=AdmissionLimits)
    policy: str = "fair"
    make_policy: Callable[[PolicySettings], Policy] | None = None
    """Makes the policy of that name; None: it is a built-in one."""
    policy_settings: PolicySettings = field(default_factory=PolicySettings)
    gap_factor: float = 1.5
    preemption: PreemptionMode = PreemptionMode.AUTO


@dataclass(slots=True)
class Totals:
    """Counts since the start, for the operator."""

    preemptions: int = 0
    swaps: int = 0  # those of the preemptions that moved blocks to the host
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0  # by steps, those of preempted sequences again
    cache_queries: int = 0  # tokens looked up in the prefix index
    cache_hits: int = 0  # and found there, on either tier
    host_hits: int = 0  # those of them that had to come from the host
    slots: int = 0  # token places in blocks in use, summed over steps
    slots_unfilled: int = 0  # those of them without a token
