"""Which process is killed, and which others run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from svc_common.supervisor.roles import Role

MAX_SECONDS = 5.0
"""Target for the first further token."""
MAX_SECONDS_OTHER = 2.0
"""The same with a second worker."""


@dataclass(frozen=True)
class FaultCase:
    """A kind of fault: kill -9 of one role. `counts` says how many processes a role has, where not one."""

    name: str
    title: str
    role: str
    counts: Mapping[str, int] = field(default_factory=dict)
    scheduler: str = "scheduler_svc"
    """The program that schedulers run."""
    bound: float = MAX_SECONDS

    def adapt(self, role: Role) -> Role:
        """The role with this case's program."""
        return replace(
            role, command=tuple(self.scheduler if word == "scheduler_svc" else word for word in role.command)
        )


CASES = (
    FaultCase("worker", "a worker, which is started again", "worker"),
    FaultCase("worker-beside", "a worker, with a second one", "worker", {"workers": 2}, bound=MAX_SECONDS_OTHER),
    FaultCase("scheduler-standby", "the scheduler, with a standby", "scheduler", {"schedulers": 2}),
    FaultCase(
        "scheduler-blind",
        "the same, which restores no cached blocks",
        "scheduler",
        {"schedulers": 2},
        "benchmarks.recovery.cacheless_scheduler",
    ),
    FaultCase("scheduler", "the only scheduler, which is started again", "scheduler"),
    FaultCase("gateway", "a gateway, with a second one", "gateway", {"gateways": 2}),
    FaultCase("redis", "Redis, which is started again", "redis"),
)
