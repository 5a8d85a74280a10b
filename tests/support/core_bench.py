"""A scheduler and replicas without workers. The test decides when outcomes arrive and what they contain."""

from dataclasses import replace
from enum import Enum, auto
from typing import Any

from memory_worker import Drawn, Options, options
from scheduler_svc.core.events import Event, FailedEvent
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.results import PROMPT_LOGPROBS, TOKENS, PromptComputation, ResultForm, ResultKind
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import (
    Direction,
    SampledSequence,
    ScheduledSequence,
    StepOutcome,
    StepPlan,
    SwapDone,
    ValueResult,
)
from svc_common.protocols import STEP_PROTOCOLS

BLOCK = 4
TOKEN = 7  # that every sequence samples, except beams
VOCAB_SIZE = 20  # of beams
EMBEDDING = ResultKind("embedding", ResultForm.VALUE)
VALUE = "value"  # of every prompt

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
    protocol=STEP_PROTOCOLS.newest,
    results=dict.fromkeys((TOKENS.name, PROMPT_LOGPROBS.name, EMBEDDING.name), PromptComputation.CHUNKED),
)
"""Costs: 0.01 ms to swap a block in or out, 4 ms to compute it."""


class CopyMode(Enum):
    """The copies that an outcome reports as done or failed."""

    DONE = auto()
    FAILED = auto()
    LATE = auto()  # nothing


class CoreBench:
    """A scheduler with one replica of `SHAPE`, changed by the given fields, and replicas added by `join`.

    Methods use the first replica by default. The policy is fcfs unless `limits` has another one.
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
        self._copies: dict[Replica, list[tuple[int, Direction]]] = {}  # in progress
        self._gives_prompt_logprobs: dict[int, bool] = {}  # by sequence id
        self.replica = self.join(**shape)

    def join(self, **shape: Any) -> Replica:
        """Adds a replica."""
        replica = Replica(replace(SHAPE, **shape))
        assert self.scheduler.add_replica(replica) == []
        self._copies[replica] = []
        return replica

    def lose(self, replica: Replica) -> list[FailedEvent]:
        """Removes a replica whose worker is lost, with its steps in flight."""
        return self.scheduler.remove_replica(replica)

    def submit_for_value(self, key: str, prompt: list[int], **fields: Any) -> Sequence:
        """Submits a request for an embedding; returns its sequence."""
        return self.submit(key, prompt, max_tokens=1, result=EMBEDDING, **fields)[0]

    def submit(self, key: str, prompt: list[int], max_tokens: int = 4, n: int = 1, **fields: Any) -> list[Sequence]:
        """Submits a request; returns its waiting sequences."""
        request = Request(key, prompt, n, max_tokens, arrived_at=self.now, **fields)
        refused = self.scheduler.submit(request, self.now)
        assert refused is None, refused
        return list(self.scheduler.sequences(key))

    def plan(self, at: Replica | None = None) -> StepPlan | None:
        """Plans a step, which is then in flight."""
        replica = at or self.replica
        plan = self.scheduler.schedule(replica, self.now)
        for each in self.scheduler.replicas:
            each.check_integrity()
        if plan is not None:
            assert len({part.sequence for part in plan.scheduled}) == len(plan.scheduled), "a sequence is in it twice"
            self.num_computed += plan.num_tokens
            self._gives_prompt_logprobs |= {new.sequence.id: new.needs_prompt_logprobs for new in plan.new_sequences}
            for direction, pairs in ((Direction.OUT, plan.swap_out), (Direction.IN, plan.swap_in)):
                if pairs:
                    self._copies[replica].append((plan.step_id, direction))
        return plan

    def commit(
        self, copies: CopyMode = CopyMode.DONE, busy_seconds: float | None = None, at: Replica | None = None
    ) -> list[Event]:
        """Commits the oldest step in flight, and the copies of all steps up to it."""
        replica = at or self.replica
        step = replica.steps_in_flight[0]
        results = [_result_of(part) for part in step.scheduled]
        prompt_logprobs = {
            place: positions
            for place, part in enumerate(step.scheduled)
            if self._gives_prompt_logprobs[part.sequence.id] and (positions := _positions_of(part))
        }
        in_progress = self._copies[replica]
        over = [copy for copy in in_progress if copy[0] <= step.step_id and copies is not CopyMode.LATE]
        self._copies[replica] = [copy for copy in in_progress if copy not in over]
        failure = "broken" if copies is CopyMode.FAILED else None
        swaps = [SwapDone(step_id, direction, 1e-4, failure) for step_id, direction in over]
        events = self.scheduler.commit(replica, StepOutcome(results, swaps, busy_seconds, prompt_logprobs), self.now)
        replica.check_integrity()
        return events

    def step(
        self, copies: CopyMode = CopyMode.DONE, busy_seconds: float | None = None, at: Replica | None = None
    ) -> StepPlan:
        """Plans a step and commits it at once."""
        plan = self.plan(at)
        assert plan is not None, "there is nothing to do"
        self.commit(copies, busy_seconds, at)
        return plan

    def steps(self, count: int) -> list[StepPlan]:
        """Runs several steps, one after the other."""
        return [self.step() for _ in range(count)]

    def run(self) -> list[Event]:
        """Runs until no request is live, with up to two steps in flight; returns the events."""
        events: list[Event] = []
        while list(self.scheduler.keys) or self.replica.steps_in_flight:
            while self.plan() is not None:
                pass
            assert self.replica.steps_in_flight, "requests are stuck"
            events += self.commit()
        assert not [event for event in events if isinstance(event, FailedEvent)]
        return events

    @property
    def num_used(self) -> int:
        """Device blocks that are not available."""
        return self.replica.shape.num_blocks - self.replica.kv.num_available


def _result_of(part: ScheduledSequence) -> SampledSequence:
    if part.samples and part.sequence.request.returns_value:
        return ValueResult(VALUE)
    if part.samples and part.sequence.request.beam is not None:
        tokens = part.sequence.tokens[: part.start + part.num_tokens]
        return Drawn([TOKEN], [Options(options(tokens, VOCAB_SIZE, part.sequence.request.beam.width))])
    return Drawn([TOKEN] if part.samples else [])


def _positions_of(part: ScheduledSequence) -> list[int]:
    """Positions of the prompt tokens after those that a part computes; the bench uses them as log-probabilities."""
    end = min(part.start + part.num_tokens + 1, len(part.sequence.request.prompt))
    return list(range(part.start + 1, end))


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that differ from those of any prompt with a distant `start`."""
    return list(range(1000 + start, 1000 + start + length))


def crowded(mode: PreemptionMode) -> CoreBench:
    """Three decoding sequences and prompts of 40 tokens. A step has room for two prompt tokens."""
    bench = CoreBench(num_blocks=19, max_step_tokens=5, preemption=mode)
    for number in range(3):
        bench.submit(f"{number}", prompt(3, 1000 * number), 60)
    bench.steps(2)
    return bench


def keys(plan: StepPlan) -> list[str]:
    """The requests of a step's sequences, in order."""
    return [part.sequence.request.key for part in plan.scheduled]


def tokens_of(plan: StepPlan) -> dict[str, int]:
    """The number of tokens that a step computes, by request."""
    return {key: sum(p.num_tokens for p in plan.scheduled if p.sequence.request.key == key) for key in keys(plan)}
