"""Answers a person who asks of a request: where it stands, what it has, what it waits for."""

import math
from collections.abc import Iterator

from scheduler_svc.core.explain import Explanation, SequenceExplanation, SequenceStatus, Summary
from scheduler_svc.core.planner import STOP_STRING_LEAD
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Phase, Sequence

_STANDINGS = {
    Phase.QUEUED: SequenceStatus.QUEUED,
    Phase.WAITING_FOR_PREFIX: SequenceStatus.WAITING_FOR_PREFIX,
    Phase.SWAPPING_IN: SequenceStatus.SWAPPING_IN,
    Phase.RUNNING: SequenceStatus.RUNNING,
    Phase.PREEMPTED: SequenceStatus.PREEMPTED,
    Phase.SWAPPED: SequenceStatus.SWAPPED,
    Phase.ENDED: SequenceStatus.ENDED,
}
_ORDER = {status: place for place, status in enumerate(SequenceStatus)}


def explain(scheduler: Scheduler, key: str, now: float) -> Explanation | None:
    """Where a request stands; None where no live one has this key. O(requests that wait)."""
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
        tenant_debt=policy.debt(request.tenant, rank),
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
            alive = [s for s in sequences if s.phase is not Phase.ENDED]
            yield Summary(
                key=key,
                tenant=request.tenant,
                priority=request.priority,
                status=max((_status(s) for s in alive), key=_ORDER.__getitem__, default=SequenceStatus.ENDED),
                age=max(0.0, now - request.arrived_at),
                num_prompt=len(request.prompt),
                num_generated=sum(s.num_output for s in sequences),
            )


def _status(sequence: Sequence) -> SequenceStatus:
    if sequence.phase is Phase.QUEUED and sequence.num_preemptions:
        return SequenceStatus.PREEMPTED
    if sequence.phase is Phase.RUNNING and sequence.num_uncomputed and not sequence.is_plannable(STOP_STRING_LEAD):
        return SequenceStatus.PAUSED
    return _STANDINGS[sequence.phase]


def _explain(scheduler: Scheduler, sequence: Sequence, now: float) -> SequenceExplanation:
    swapped_kv = sequence.swapped_kv
    leader = scheduler.waiting.prefix_waiters.leader_of(sequence)
    preemption = sequence.last_preemption
    if preemption is not None and math.isinf(preemption.swap_seconds):
        preemption = None  # there is nowhere to swap to: nothing was weighed
    missing = [_num_missing(scheduler, replica, sequence) for replica in scheduler.replicas]
    return SequenceExplanation(
        index=sequence.index,
        status=_status(sequence),
        num_known=len(sequence.tokens),
        num_computed=sequence.num_computed if swapped_kv is None else swapped_kv.num_tokens,
        num_generated=sequence.num_output,
        num_device_blocks=len(sequence.block_ids) + (len(swapped_kv.kept_block_ids) if swapped_kv is not None else 0),
        num_host_blocks=len(swapped_kv.host_ids) if swapped_kv is not None else 0,
        num_missing_blocks=min(missing, default=0),
        num_ahead=_num_ahead(scheduler, sequence, now),
        awaits_key=leader.request.key if leader is not None else None,
        num_preemptions=sequence.num_preemptions,
        last_preemption=preemption,
        predicted_start=_predicted_start(scheduler, sequence, now),
    )


def _num_ahead(scheduler: Scheduler, sequence: Sequence, now: float) -> int | None:
    """How many go before one that waits: swapped ones come back before others of their class."""
    policy = scheduler.waiting.policy

    def turn(other: Sequence) -> tuple[int, int, int]:
        return (-policy.effective_priority(other, now), other.arrival, other.index)

    if sequence.phase is Phase.SWAPPED and sequence.replica is not None:
        return sum(turn(other) < turn(sequence) for other in sequence.replica.swapped)
    if (place := scheduler.waiting.quarantine.position(sequence)) is not None:
        return place
    if sequence.phase is not Phase.QUEUED or sequence.is_one_of_beams:
        return None
    swapped = [other for replica in scheduler.replicas for other in replica.swapped]
    return policy.position(sequence, now) + sum(turn(other)[0] <= turn(sequence)[0] for other in swapped)


def _predicted_start(scheduler: Scheduler, sequence: Sequence, now: float) -> float | None:
    """Seconds until one that waits runs, by the queue before it and the first who makes room; None: nobody knows."""
    rates = scheduler.rates(now)
    if sequence.phase is Phase.QUEUED:
        return scheduler.waiting.admission.predicted_wait(sequence.request, rates)
    if sequence.phase is Phase.SWAPPED and sequence.replica is not None and sequence.swapped_kv is not None:
        return rates.first_place_seconds + sequence.replica.costs.swap_seconds(0, len(sequence.swapped_kv.host_ids))
    return None


def _num_missing(scheduler: Scheduler, replica: Replica, sequence: Sequence) -> int:
    """Blocks that a sequence that waits would need here beyond those that are available to it."""
    if sequence.phase is Phase.QUEUED:
        needed = replica.num_needed(sequence, replica.match(sequence))
    elif sequence.phase is Phase.SWAPPED and sequence.replica is replica:
        needed = replica.num_needed_to_resume(sequence)
    else:
        return 0
    scheduler.placement.measure(replica)
    reserve = 0 if sequence.is_one_of_beams else scheduler.planner.reserve(replica)
    return max(0, needed + reserve - replica.device.pool.num_available)
