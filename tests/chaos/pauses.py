"""The longest pauses of streams that docs/guarantees.md allows, by what fails."""

from collections.abc import Iterable

from tests.chaos.fault_runner import Recovery
from tests.chaos.faults import Fault, Target

LIMITS = {
    Target.WORKER: 10.0,
    Target.SCHEDULER: 10.0,
    Target.GATEWAY: 10.0,
    Target.REDIS: 5.0,
    Target.CLIENT_GATEWAY: 15.0,
    Target.GATEWAY_SCHEDULER: 15.0,
    Target.SCHEDULER_WORKER: 15.0,
    Target.SCHEDULER_REDIS: 5.0,
}
"""Seconds from a fault until half as many streams as before it receive tokens."""


def too_long(recoveries: Iterable[tuple[Fault, Recovery]], factor: float = 1.0) -> list[str]:
    """A message for each pause over its limit times `factor`."""
    return [
        f"after fault {fault.number} ({fault}), streams paused for {recovery.pause:.1f} s; "
        f"the limit is {factor * LIMITS[fault.target]:g} s"
        for fault, recovery in recoveries
        if recovery.pause > factor * LIMITS[fault.target]
    ]
