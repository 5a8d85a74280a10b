"""What is killed, and what stands beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_SECONDS = 5.0
"""What is asked of the first further token."""
MAX_SECONDS_OTHER = 2.0
"""The same where a second worker stands by."""


@dataclass(frozen=True)
class FaultCase:
    """A kind of fault: kill -9 of one role, under as many of each as `counts` says, one of each but for that."""

    name: str
    title: str
    role: str
    counts: Mapping[str, int] = field(default_factory=dict)
    scheduler: str = "scheduler_svc"
    """The program of schedulers."""
    bound: float = MAX_SECONDS


CASES = (
    FaultCase("worker", "a worker, which is started again", "worker"),
    FaultCase("worker-beside", "a worker, with a second one", "worker", {"workers": 2}, bound=MAX_SECONDS_OTHER),
    FaultCase("scheduler-standby", "the scheduler, with one that stands by", "scheduler", {"schedulers": 2}),
    FaultCase(
        "scheduler-blind",
        "the same, which takes no blocks over",
        "scheduler",
        {"schedulers": 2},
        "benchmarks.recovery.cacheless_scheduler",
    ),
    FaultCase("scheduler", "the only scheduler, which is started again", "scheduler"),
    FaultCase("gateway", "a gateway, with a second one", "gateway", {"gateways": 2}),
    FaultCase("redis", "Redis, which is started again", "redis"),
)
