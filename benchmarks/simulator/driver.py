"""The only part of the simulator that depends on the core's interface."""

from dataclasses import dataclass

from benchmarks.simulator.device import StepCompletion, StepWork
from benchmarks.simulator.machine import Machine
from benchmarks.simulator.prompts import NOTHING, STOP_TOKEN, Token, Tokens
from benchmarks.simulator.request_record import RequestRecord
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.events import Event, FailedEvent
from scheduler_svc.core.limits import MAX_STEPS_IN_FLIGHT, SchedulerLimits
from scheduler_svc.core.policy import PolicySettings
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepOutcome, StepPlan
from scheduler_svc.core.step_pacing import StepPacing

__all__ = [
    "MAX_STEPS_IN_FLIGHT",
    "CoreDriver",
    "CoreFigures",
    "MemoryUsage",
    "PreemptionMode",
    "Replica",
    "Setup",
    "SimulatedStep",
    "StepPacing",
]

_STOP = frozenset({STOP_TOKEN})


@dataclass(frozen=True, slots=True)
class Setup:
    """The simulated deployment."""

    machine: Machine
    num_replicas: int = 1
    policy: str = "fair"
    ageing_seconds: float = 10.0
    preemption: PreemptionMode = PreemptionMode.AUTO
    max_queued: int = AdmissionLimits().max_requests


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step of one replica: its work, and its results."""

    plan: StepPlan
    work: StepWork
    results: list[Token]
    admitted: list[RequestRecord]


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Blocks of all replicas, in use and cached."""

    used: int
    cached: int
    host_used: int
    host_cached: int


@dataclass(frozen=True, slots=True)
class CoreFigures:
    """Counters of the core: preemptions by choice; tokens looked up, and those found on the device and on the host."""

    num_swapped: int
    num_recomputed: int
    num_looked_up: int
    num_found_on_device: int
    num_found_on_host: int


def record_of(request: Request) -> RequestRecord:
    """The record that goes with a request through the core."""
    assert isinstance(request.sampling, RequestRecord)
    return request.sampling


def outcome_of(step: SimulatedStep, done: StepCompletion) -> StepOutcome:
    """The outcome of a finished step, for the core."""
    return StepOutcome(step.results, done.swaps, done.seconds)


class CoreDriver:
    """A scheduler over modelled replicas. `now` is in seconds, on the simulation's clock."""

    def __init__(self, setup: Setup, tokens: Tokens) -> None:
        machine = setup.machine
        self.core = Scheduler(
            SchedulerLimits(
                queue=AdmissionLimits(max_requests=setup.max_queued),
                policy=setup.policy,
                policy_settings=PolicySettings(ageing_seconds=setup.ageing_seconds),
                preemption=setup.preemption,
            )
        )
        self._tokens = tokens
        shape = ReplicaShape(
            fingerprint=b"simulated",
            block_size=machine.block_size,
            num_blocks=machine.num_blocks,
            context_length=machine.context_length,
            max_step_tokens=machine.max_step_tokens,
            usual_step_tokens=machine.usual_step_tokens,
            max_sequences=machine.max_sequences,
            num_host_blocks=machine.num_host_blocks,
            block_bytes=machine.block_bytes,
            swap_bytes_per_second=machine.bytes_per_second,
            prefill_tokens_per_second=machine.prefill_tokens_per_second,
        )
        self.replicas = [Replica(shape) for _ in range(setup.num_replicas)]
        for replica in self.replicas:
            self.core.add_replica(replica)

    @property
    def num_waiting(self) -> int:
        """Waiting sequences of all replicas."""
        return len(self.core.waiting.policy)

    def submit(self, record: RequestRecord, prompt: list[int], now: float) -> FailedEvent | None:
        """Queues a request, or returns why not."""
        arrival = record.arrival
        request = Request(
            key=str(record.number),
            prompt=prompt,
            n=arrival.n,
            max_tokens=arrival.max_tokens,
            stop_token_ids=_STOP,
            sampling=record,
            priority=arrival.priority,
            tenant=arrival.tenant,
            weight=arrival.weight,
            arrived_at=now,
            deadline=None if arrival.deadline is None else now + arrival.deadline,
        )
        refusal = self.core.submit(request, now)
        for sequence in self.core.sequences(request.key)[:1]:
            record.prompt_seconds = sequence.prompt_seconds
        return refusal

    def expire(self, now: float) -> list[FailedEvent]:
        """Ends requests whose deadline has passed."""
        return self.core.expire(now)

    def schedule(self, replica: Replica, now: float) -> SimulatedStep | None:
        """The replica's next step; None where there is nothing to do now."""
        plan = self.core.schedule(replica, now)
        return None if plan is None else self.read(plan)

    def take_placed(self) -> list[Replica]:
        """Replicas that got work while steps of others were planned."""
        return self.core.take_placed()

    def commit(self, replica: Replica, step: SimulatedStep, done: StepCompletion, now: float) -> list[Event]:
        """Commits the oldest step in flight, and returns its events."""
        return self.core.commit(replica, outcome_of(step, done), now)

    def memory(self) -> MemoryUsage:
        device = [replica.kv.device.counts for replica in self.replicas]
        host = [replica.kv.host.counts for replica in self.replicas]
        return MemoryUsage(
            used=sum(count.used + count.copying for count in device),
            cached=sum(count.cached for count in device),
            host_used=sum(count.used + count.copying for count in host),
            host_cached=sum(count.cached for count in host),
        )

    def figures(self) -> CoreFigures:
        totals = self.core.totals
        return CoreFigures(
            num_swapped=totals.swaps,
            num_recomputed=totals.preemptions - totals.swaps - totals.keeps,
            num_looked_up=totals.cache_queries,
            num_found_on_device=totals.cache_hits - totals.host_hits,
            num_found_on_host=totals.host_hits,
        )

    def read(self, plan: StepPlan) -> SimulatedStep:
        """The work of a plan, and the tokens that it samples. Runs once for each sequence of each step."""
        num_prefill = num_decodes = num_context = num_pairs = 0
        results = []
        draw = self._tokens.draw
        for part in plan.scheduled:
            record = record_of(part.sequence.request)
            start, num_tokens = part.start, part.num_tokens
            if num_tokens == 1:
                num_decodes += 1
                num_context += start
            else:
                num_prefill += num_tokens
                num_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
            results.append(draw(record.script, start + num_tokens) if part.samples else NOTHING)
        work = StepWork(num_prefill, num_decodes, num_context, num_pairs, len(plan.swap_out), len(plan.swap_in))
        return SimulatedStep(plan, work, results, [record_of(new.sequence.request) for new in plan.new_sequences])
