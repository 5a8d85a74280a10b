"""A scheduler and its replicas on a bench: answers come when a test says so, and as it says. Nothing computes."""

from dataclasses import replace
from enum import Enum, auto
from typing import Any

from memory_worker import Drawn
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.plan import Direction, Event, FailedEvent, StepOutcome, StepPlan, SwapDone
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.core.replica import Replica, ReplicaShape
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Request, Sequence

BLOCK = 4
TOKEN = 7  # what every sequence draws

SHAPE = ReplicaShape(
    fingerprint=b"model",
    block_size=BLOCK,
    num_blocks=256,
    context_length=100_000,
    max_step_tokens=64,
    max_sequences=16,
    num_host_blocks=64,
    block_bytes=1000,
    swap_bytes_per_second=1e8,
    prefill_tokens_per_second=1000.0,
)
"""Swapping a block costs 0.01 ms each way, computing one 4 ms."""


class CopyMode(Enum):
    """What an answer says of the copies that are under way."""

    DONE = auto()
    FAILED = auto()
    LATE = auto()  # nothing


class CoreBench:
    """One replica of `SHAPE`, but for what is given, and those that join it; what names none is of the first.

    First come, first served, if `limits` does not say otherwise.
    """

    def __init__(
        self,
        *,
        policy: str = "fcfs",
        preemption: PreemptionMode = PreemptionMode.AUTO,
        limits: SchedulerLimits | None = None,
        **shape: Any,
    ) -> None:
        self.scheduler = Scheduler(limits or SchedulerLimits(policy=policy, preemption=preemption))
        self.now = 0.0
        self.num_computed = 0  # tokens
        self._copies: dict[Replica, list[tuple[int, Direction]]] = {}  # under way
        self.replica = self.join(**shape)

    def join(self, **shape: Any) -> Replica:
        """Another replica."""
        replica = Replica(replace(SHAPE, **shape))
        assert self.scheduler.add_replica(replica) == []
        self._copies[replica] = []
        return replica

    def lose(self, replica: Replica) -> list[FailedEvent]:
        """A replica's worker dies, with what is in flight there."""
        return self.scheduler.remove_replica(replica)

    def submit(self, key: str, prompt: list[int], max_tokens: int = 4, n: int = 1, **fields: Any) -> list[Sequence]:
        """A request's sequences, which wait from now on."""
        request = Request(key, prompt, n, max_tokens, arrived_at=self.now, **fields)
        refused = self.scheduler.submit(request, self.now)
        assert refused is None, refused
        return list(self.scheduler.sequences(key))

    def plan(self, at: Replica | None = None) -> StepPlan | None:
        """Make a step; it is in flight from now on."""
        replica = at or self.replica
        plan = self.scheduler.schedule(replica, self.now)
        for each in self.scheduler.replicas:
            each.check_integrity()
        if plan is not None:
            self.num_computed += plan.num_tokens
            for direction, pairs in ((Direction.OUT, plan.swap_out), (Direction.IN, plan.swap_in)):
                if pairs:
                    self._copies[replica].append((plan.step_id, direction))
        return plan

    def commit(
        self, copies: CopyMode = CopyMode.DONE, busy_seconds: float | None = None, at: Replica | None = None
    ) -> list[Event]:
        """Answer the oldest step in flight, and with it the copies of all steps up to it."""
        replica = at or self.replica
        step = replica.in_flight[0]
        results = [Drawn([TOKEN] if part.samples else []) for part in step.scheduled]
        in_progress = self._copies[replica]
        over = [copy for copy in in_progress if copy[0] <= step.step_id and copies is not CopyMode.LATE]
        self._copies[replica] = [copy for copy in in_progress if copy not in over]
        failure = "broken" if copies is CopyMode.FAILED else None
        swaps = [SwapDone(step_id, direction, 1e-4, failure) for step_id, direction in over]
        events = self.scheduler.commit(replica, StepOutcome(results, swaps, busy_seconds), self.now)
        replica.check_integrity()
        return events

    def step(
        self, copies: CopyMode = CopyMode.DONE, busy_seconds: float | None = None, at: Replica | None = None
    ) -> StepPlan:
        """Make a step and answer it at once."""
        plan = self.plan(at)
        assert plan is not None, "there is nothing to do"
        self.commit(copies, busy_seconds, at)
        return plan

    def steps(self, count: int) -> list[StepPlan]:
        """Several, one after the other."""
        return [self.step() for _ in range(count)]

    def run(self) -> list[Event]:
        """Go on until nobody is left, with two steps in flight as in life. What there was to tell."""
        events: list[Event] = []
        while list(self.scheduler.keys) or self.replica.in_flight:
            while self.plan() is not None:
                pass
            assert self.replica.in_flight, "requests are stuck"
            events += self.commit()
        assert not [event for event in events if isinstance(event, FailedEvent)]
        return events

    @property
    def num_used(self) -> int:
        """Blocks of the device that cannot be had for others now."""
        return self.replica.shape.num_blocks - self.replica.device.pool.num_available


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other prompt has, whose `start` is far enough off."""
    return list(range(1000 + start, 1000 + start + length))


def keys(plan: StepPlan) -> list[str]:
    """Whose sequences a step computes, in its order."""
    return [part.sequence.request.key for part in plan.scheduled]


def tokens_of(plan: StepPlan) -> dict[str, int]:
    """How many tokens of each request a step computes."""
    return {key: sum(p.num_tokens for p in plan.scheduled if p.sequence.request.key == key) for key in keys(plan)}
