"""Why a request waits, or how it runs, for operators."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, PreemptionRecord, Sequence
from scheduler_svc.core.scheduler import Scheduler


class SequenceStatus(Enum):
    """A sequence's state as operators see it, in the order of progress."""

    QUEUED = auto()  # waits for its turn, or for blocks; has not run, or its worker was lost
    HELD_BACK = auto()  # waits for other sequences of its account, which is at a limit
    WAITING_FOR_PREFIX = auto()  # waits for blocks that another sequence is computing
    PREEMPTED = auto()  # leaves its replica, or waits to compute its tokens again
    SWAPPED = auto()  # waits with its unshared blocks in host memory
    SWAPPING_IN = auto()  # its blocks are being copied from host memory
    WAITING_FOR_TOKENS = auto()  # the token budget of its key is used up
    PAUSED = auto()  # as far ahead of its gateway's search for stop strings as it may be
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class SequenceExplanation:
    """One sequence.

    `num_ahead` is how many sequences are admitted or resumed before it, None unless it waits; `awaits_key` the request
    whose blocks it waits for. `num_missing_blocks` are the blocks that it needs to continue and that are not available
    on the device now. `predicted_start` is in seconds from now, None if it runs or nothing is known.
    """

    index: int
    status: SequenceStatus
    num_known: int
    num_computed: int
    num_generated: int
    num_device_blocks: int
    num_host_blocks: int
    num_missing_blocks: int = 0
    num_ahead: int | None = None
    awaits_key: str | None = None
    num_preemptions: int = 0
    last_preemption: PreemptionRecord | None = None
    predicted_start: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One live request of a model. `age` and `time_left`, until its deadline, are in seconds.

    `effective_priority` is the class that it counts as now. `tenant_debt` is its tenant's virtual token counter less
    the smallest of its class. `num_waiting` requests wait for its model, this one included if it waits.
    """

    key: str
    tenant: str
    policy: str
    priority: int
    effective_priority: int
    tenant_debt: float
    age: float
    time_left: float | None
    num_prompt: int
    max_tokens: int
    num_waiting: int
    sequences: tuple[SequenceExplanation, ...]
    model: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """A live request in a line. `status` is that of its furthest sequence, `age` is in seconds."""

    key: str
    tenant: str
    priority: int
    status: SequenceStatus
    age: float
    num_prompt: int
    num_generated: int
    model: str = ""


_STATUSES = {
    Phase.QUEUED: SequenceStatus.QUEUED,
    Phase.WAITING_FOR_PREFIX: SequenceStatus.WAITING_FOR_PREFIX,
    Phase.SWAPPING_IN: SequenceStatus.SWAPPING_IN,
    Phase.RUNNING: SequenceStatus.RUNNING,
    Phase.PREEMPTED: SequenceStatus.PREEMPTED,
    Phase.SWAPPED: SequenceStatus.SWAPPED,
    Phase.ENDED: SequenceStatus.ENDED,
}
_PROGRESS = {status: index for index, status in enumerate(SequenceStatus)}


def explain(scheduler: Scheduler, key: str, now: float) -> Explanation | None:
    """Explains a request; None if no live one has this key. O(requests that wait)."""
    sequences = scheduler.sequences(key)
    if not sequences:
        return None
    request, policy = sequences[0].request, scheduler.waiting.policy
    rank = policy.effective_priority(sequences[0], now)
    return Explanation(
        key=key,
        tenant=request.tenant,
        policy=scheduler.limits.policy,
        priority=request.priority,
        effective_priority=rank,
        tenant_debt=max(0.0, policy.debt(request.tenant, rank)),
        age=max(0.0, now - request.arrived_at),
        time_left=None if request.deadline is None else max(0.0, request.deadline - now),
        num_prompt=len(request.prompt),
        max_tokens=request.max_tokens,
        num_waiting=scheduler.waiting.admission.num_requests,
        sequences=tuple(_explain(scheduler, sequence, now) for sequence in sequences),
    )


def summaries(scheduler: Scheduler, tenant: str | None, now: float) -> Iterator[Summary]:
    """Live requests in a line each, of one tenant or of all, oldest first; made as they are read."""
    for key in list(scheduler.keys):
        sequences = scheduler.sequences(key)
        if sequences and tenant in (None, sequences[0].request.tenant):
            request = sequences[0].request
            live = [s for s in sequences if s.phase is not Phase.ENDED]
            yield Summary(
                key=key,
                tenant=request.tenant,
                priority=request.priority,
                status=max(
                    (_status_in(scheduler, s) for s in live), key=_PROGRESS.__getitem__, default=SequenceStatus.ENDED
                ),
                age=max(0.0, now - request.arrived_at),
                num_prompt=len(request.prompt),
                num_generated=sum(s.num_output for s in sequences),
            )


def count_unpaid(scheduler: Scheduler) -> int:
    """How many sequences wait for tokens of their account. O(live sequences)."""
    if not len(scheduler.budgets):
        return 0
    live = (sequence for key in scheduler.keys for sequence in scheduler.sequences(key))
    return sum(_status(sequence) is SequenceStatus.WAITING_FOR_TOKENS for sequence in live)


def _status(sequence: Sequence) -> SequenceStatus:
    if sequence.phase in (Phase.QUEUED, Phase.SWAPPED) and not sequence.can_pay:
        return SequenceStatus.WAITING_FOR_TOKENS
    if sequence.phase is Phase.QUEUED and sequence.num_preemptions:
        return SequenceStatus.PREEMPTED
    if sequence.phase is Phase.RUNNING and sequence.num_uncomputed and not sequence.num_steps_in_flight:
        if not sequence.has_budget:
            return SequenceStatus.WAITING_FOR_TOKENS
        return SequenceStatus.RUNNING if sequence.is_plannable else SequenceStatus.PAUSED
    return _STATUSES[sequence.phase]


def _status_in(scheduler: Scheduler, sequence: Sequence) -> SequenceStatus:
    status = _status(sequence)
    is_held = status in (SequenceStatus.QUEUED, SequenceStatus.PREEMPTED) and scheduler.waiting.accounts.holds(sequence)
    return SequenceStatus.HELD_BACK if is_held else status


def _explain(scheduler: Scheduler, sequence: Sequence, now: float) -> SequenceExplanation:
    swapped_kv = sequence.swapped_kv
    at = _swapped_at(scheduler, sequence)
    producer = scheduler.waiting.prefix_waiters.producer_of(sequence)
    preemption = sequence.last_preemption
    if preemption is not None and math.isinf(preemption.swap_seconds):
        preemption = None  # there is no host memory: no costs were compared
    missing = [_num_missing(scheduler, replica, sequence, at) for replica in scheduler.replicas]
    return SequenceExplanation(
        index=sequence.index,
        status=_status_in(scheduler, sequence),
        num_known=len(sequence.tokens),
        num_computed=sequence.num_computed if swapped_kv is None else swapped_kv.num_tokens,
        num_generated=sequence.num_output,
        num_device_blocks=len(sequence.block_ids) + (len(swapped_kv.kept_block_ids) if swapped_kv is not None else 0),
        num_host_blocks=len(swapped_kv.host_ids) if swapped_kv is not None else 0,
        num_missing_blocks=min(missing, default=0),
        num_ahead=_num_ahead(scheduler, sequence, at, now),
        awaits_key=producer.request.key if producer is not None else None,
        num_preemptions=sequence.num_preemptions,
        last_preemption=preemption,
        predicted_start=_predicted_start(scheduler, sequence, at, now),
    )


def _swapped_at(scheduler: Scheduler, sequence: Sequence) -> Replica | None:
    """The replica on which a sequence is swapped out."""
    if sequence.phase is not Phase.SWAPPED:
        return None
    return next((replica for replica in scheduler.replicas if replica.holds(sequence)), None)


def _num_ahead(scheduler: Scheduler, sequence: Sequence, at: Replica | None, now: float) -> int | None:
    """How many sequences are admitted or resumed before this one: swapped ones, unless class or tenant are behind."""
    scheduler.waiting.now = max(scheduler.waiting.now, now)
    rank = scheduler.waiting.rank
    if at is not None:
        own = (rank(sequence), sequence.arrival, sequence.index)
        return sum((rank(other), other.arrival, other.index) < own for other in at.swapped)
    if sequence.phase is not Phase.QUEUED:
        return None
    swapped = (other for replica in scheduler.replicas for other in replica.swapped)
    num_swapped = sum(rank(other) <= rank(sequence) for other in swapped)
    return scheduler.waiting.num_ahead(sequence, num_swapped, now)


def _predicted_start(scheduler: Scheduler, sequence: Sequence, at: Replica | None, now: float) -> float | None:
    """Seconds until a sequence that waits runs, by the queue ahead of it and the first free slot; None if unknown."""
    if scheduler.waiting.accounts.holds(sequence):
        return None  # when sequences of its account end is not known
    rates, slot_seconds = scheduler.rates(now), scheduler.slot_wait.seconds(sequence.request)
    if sequence.phase is Phase.QUEUED:
        return scheduler.waiting.admission.predicted_wait(sequence.request, rates, slot_seconds)
    if at is not None and sequence.swapped_kv is not None:
        return slot_seconds + at.costs.swap_seconds(0, len(sequence.swapped_kv.host_ids))
    return None


def _num_missing(scheduler: Scheduler, replica: Replica, sequence: Sequence, at: Replica | None) -> int:
    """Blocks that a sequence that waits would need on a replica beyond those that are available to it."""
    if sequence.phase is Phase.QUEUED:
        num_needed = replica.kv.num_needed(sequence, replica.kv.match(sequence))
    elif at is replica:
        num_needed = scheduler.capacity.num_needed_to_resume(replica, sequence)
    else:
        return 0
    scheduler.placement.measure(replica)
    return max(0, num_needed + scheduler.capacity.reserve(replica, sequence) - replica.kv.num_available)
