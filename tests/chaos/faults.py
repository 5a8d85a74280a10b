"""What goes wrong, and when: a schedule that a seed repeats."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, count, repeat

from tests.chaos.proxy import Trouble


class Action(StrEnum):
    """What is done."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    TERM = "SIGTERM"
    CUT = "cut"
    HOLD = "hold"
    DELAY = "delay"
    THROTTLE = "throttle"


class Place(StrEnum):
    """To whom, or between whom."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    REDIS = "redis"
    CLIENT_GATEWAY = "client-gateway"
    GATEWAY_SCHEDULER = "gateway-scheduler"
    SCHEDULER_WORKER = "scheduler-worker"
    SCHEDULER_REDIS = "scheduler-redis"


ROLES = (Place.GATEWAY, Place.SCHEDULER, Place.WORKER, Place.REDIS)
LINKS = (Place.CLIENT_GATEWAY, Place.GATEWAY_SCHEDULER, Place.SCHEDULER_WORKER, Place.SCHEDULER_REDIS)
TO_ROLES = (Action.KILL, Action.STOP, Action.TERM)
TO_LINKS = (Action.CUT, Action.HOLD, Action.DELAY, Action.THROTTLE)
EARLY_SHARE = 0.1


@dataclass(frozen=True)
class Fault:
    """One fault. Times are in seconds."""

    number: int
    action: Action
    place: Place
    seconds: float
    """How long it lasts: how long a process is stopped or a link is in trouble; 0 for what happens at once."""
    trouble: Trouble
    """What is wrong with links meanwhile."""
    pick: float
    """In [0, 1): which one of several it hits."""
    pause: float
    """How long it waits once it may come."""
    is_early: bool
    """It comes while the one before it may still last, before all streams have gone on after that, and hits the same
    role or pair."""

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        details = ""
        if self.action is Action.DELAY:
            details = f" by {self.trouble.delay * 1e3:.0f} ms"
        elif self.action is Action.THROTTLE:
            details = f" to {self.trouble.bytes_per_second / 1e3:.1f} kB/s"
        return f"{self.action} {self.place}{details}{lasting}{', early' if self.is_early else ''}"


def schedule(seed: int) -> Iterator[Fault]:
    """Faults without end, the same ones for the same seed: all kinds come before any comes again.

    What happens to roles comes twice as often as what happens to links. Never are two early ones in a row: a request
    that ran in two deaths of its worker without a token is tried alone, and a third one would fail it, as it should.
    """
    rng = random.Random(seed)
    last: Fault | None = None
    deck: list[tuple[Action, Place]] = []
    for number in count(1):
        is_early = last is not None and not last.is_early and rng.random() < EARLY_SHARE
        if last is not None and is_early:
            place = last.place
            action = rng.choice(TO_ROLES if place in ROLES else TO_LINKS)
        else:
            if not deck:
                roles = [(action, place) for place in ROLES for action in TO_ROLES]
                links = [(action, place) for place in LINKS for action in TO_LINKS]
                deck = list(chain.from_iterable(repeat(roles, 2))) + links
                rng.shuffle(deck)
            action, place = deck.pop()
        last = _draw(rng, number, action, place, is_early)
        yield last


def _draw(rng: random.Random, number: int, action: Action, place: Place, is_early: bool) -> Fault:
    def between(low: float, high: float) -> float:
        """Short ones as likely as long ones."""
        return low * float((high / low) ** rng.random())

    seconds, trouble = 0.0, Trouble()
    match action:
        case Action.STOP:
            # Around what each service takes for the death of another: a lease of 2 s, 5 s for a worker.
            seconds = between(0.2, 8.0)
        case Action.CUT:
            seconds, trouble = between(0.02, 5.0), Trouble(is_truncated=True)
        case Action.HOLD:
            seconds, trouble = between(0.1, 8.0), Trouble(is_held=True)
        case Action.DELAY:
            seconds, trouble = between(0.5, 4.0), Trouble(delay=between(0.02, 0.6))
        case Action.THROTTLE:
            seconds, trouble = between(0.5, 4.0), Trouble(bytes_per_second=between(4e3, 1e5))
    pause = rng.uniform(0, 0.3 if is_early else 0.8)
    return Fault(number, action, place, seconds, trouble, rng.random(), pause, is_early)
