"""The schedule of faults. A seed repeats it."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, count, repeat

from tests.chaos.proxy import LinkFault


class Action(StrEnum):
    """A signal to a process, or a fault of a link."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    TERM = "SIGTERM"
    RESET = "reset"
    STALL = "stall"
    DELAY = "delay"
    THROTTLE = "throttle"


class Target(StrEnum):
    """A role, or the links between two roles."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    REDIS = "redis"
    CLIENT_GATEWAY = "client-gateway"
    GATEWAY_SCHEDULER = "gateway-scheduler"
    SCHEDULER_WORKER = "scheduler-worker"
    SCHEDULER_REDIS = "scheduler-redis"


ROLES = (Target.GATEWAY, Target.SCHEDULER, Target.WORKER, Target.REDIS)
LINKS = (Target.CLIENT_GATEWAY, Target.GATEWAY_SCHEDULER, Target.SCHEDULER_WORKER, Target.SCHEDULER_REDIS)
ROLE_ACTIONS = (Action.KILL, Action.STOP, Action.TERM)
LINK_ACTIONS = (Action.RESET, Action.STALL, Action.DELAY, Action.THROTTLE)
OVERLAP_SHARE = 0.1


@dataclass(frozen=True)
class Fault:
    """One fault. Times are in seconds."""

    number: int
    action: Action
    target: Target
    seconds: float
    """How long a process is stopped or a link is faulty; 0 for KILL and TERM."""
    link_fault: LinkFault
    """The fault that the links have for `seconds`."""
    pick: float
    """In [0, 1): selects one of the instances that the fault can hit."""
    pause: float
    """Delay before the fault is injected."""
    is_overlapping: bool
    """The fault has the target of the previous fault, and is injected before all streams have recovered from that."""

    def __str__(self) -> str:
        duration = f" for {self.seconds:.2f} s" if self.seconds else ""
        details = ""
        if self.action is Action.DELAY:
            details = f" by {self.link_fault.delay * 1e3:.0f} ms"
        elif self.action is Action.THROTTLE:
            details = f" to {self.link_fault.bytes_per_second / 1e3:.1f} kB/s"
        return f"{self.action} {self.target}{details}{duration}{', overlapping' if self.is_overlapping else ''}"


def schedule(seed: int) -> Iterator[Fault]:
    """An endless sequence of faults, the same for the same seed. Each kind occurs before any kind is repeated.

    Each fault of a role occurs twice as often as each fault of a link. Two overlapping faults never follow each other:
    after two lost workers without a token, a request is run in isolation, and a third lost worker fails the request.
    """
    rng = random.Random(seed)
    last: Fault | None = None
    remaining: list[tuple[Action, Target]] = []
    for number in count(1):
        is_overlapping = last is not None and not last.is_overlapping and rng.random() < OVERLAP_SHARE
        if last is not None and is_overlapping:
            target = last.target
            action = rng.choice(ROLE_ACTIONS if target in ROLES else LINK_ACTIONS)
        else:
            if not remaining:
                roles = [(action, target) for target in ROLES for action in ROLE_ACTIONS]
                links = [(action, target) for target in LINKS for action in LINK_ACTIONS]
                remaining = list(chain.from_iterable(repeat(roles, 2))) + links
                rng.shuffle(remaining)
            action, target = remaining.pop()
        last = _random_fault(rng, number, action, target, is_overlapping)
        yield last


def _random_fault(rng: random.Random, number: int, action: Action, target: Target, is_overlapping: bool) -> Fault:
    def between(low: float, high: float) -> float:
        """A log-uniform value."""
        return low * float((high / low) ** rng.random())

    seconds, link_fault = 0.0, LinkFault()
    match action:
        case Action.STOP:
            # Shorter and longer than the timeouts that detect a dead process: 2 s for the lease, 5 s for a worker.
            seconds = between(0.2, 8.0)
        case Action.RESET:
            seconds, link_fault = between(0.02, 5.0), LinkFault(is_reset=True)
        case Action.STALL:
            seconds, link_fault = between(0.1, 8.0), LinkFault(is_stalled=True)
        case Action.DELAY:
            seconds, link_fault = between(0.5, 4.0), LinkFault(delay=between(0.02, 0.6))
        case Action.THROTTLE:
            seconds, link_fault = between(0.5, 4.0), LinkFault(bytes_per_second=between(4e3, 1e5))
    pause = rng.uniform(0, 0.3 if is_overlapping else 0.8)
    return Fault(number, action, target, seconds, link_fault, rng.random(), pause, is_overlapping)
