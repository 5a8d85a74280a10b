"""Between the core's values and the messages of both streams."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple, cast

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.beam_search import BeamParams, Choice, EarlyStopping, num_candidates
from scheduler_svc.core.block_hash_report import BlockHashReport
from scheduler_svc.core.plan import (
    BlockHash,
    BlockPair,
    Direction,
    Event,
    FailedEvent,
    Failure,
    MaxTokens,
    ScheduledSequence,
    StepOutcome,
    StepPlan,
    StopToken,
    SwapDone,
)
from scheduler_svc.core.replica import ReplicaShape
from scheduler_svc.core.sequence import Request, Sequence
from scheduler_svc.request_log import RequestLog
from svc_common.durations import to_duration, to_seconds

_FAILURES = {
    Failure.KEY_IN_USE: scheduler_v1.FAILURE_REASON_KEY_IN_USE,
    Failure.DEADLINE_EXCEEDED: scheduler_v1.FAILURE_REASON_DEADLINE_EXCEEDED,
    Failure.CANCELLED: scheduler_v1.FAILURE_REASON_CANCELLED,
    Failure.INVALID: scheduler_v1.FAILURE_REASON_INVALID,
    Failure.SEARCH_TOO_WIDE: scheduler_v1.FAILURE_REASON_SEARCH_TOO_WIDE,
    Failure.TOO_MANY_TOKENS: scheduler_v1.FAILURE_REASON_TOO_MANY_TOKENS,
    Failure.CONTEXT_LENGTH_EXCEEDED: scheduler_v1.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED,
    Failure.UNAVAILABLE: scheduler_v1.FAILURE_REASON_UNAVAILABLE,
    Failure.TENANT_OVER_QUOTA: scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA,
    Failure.DEADLINE_INFEASIBLE: scheduler_v1.FAILURE_REASON_DEADLINE_INFEASIBLE,
    Failure.INTERNAL: scheduler_v1.FAILURE_REASON_INTERNAL,
    Failure.QUARANTINED: scheduler_v1.FAILURE_REASON_QUARANTINED,
    Failure.UNKNOWN_REQUEST: scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST,
    Failure.STORE_DEGRADED: scheduler_v1.FAILURE_REASON_STORE_DEGRADED,
    Failure.DIVERGED: scheduler_v1.FAILURE_REASON_DIVERGED,
}
_REASONS = {reason: failure for failure, reason in _FAILURES.items()}

_EARLY_STOPPINGS = {
    scheduler_v1.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    scheduler_v1.EARLY_STOPPING_AT_WIDTH: EarlyStopping.AT_WIDTH,
    scheduler_v1.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def request_from_proto(submit: scheduler_v1.Submit, now: float) -> Request:
    """A request as the core knows it; `now` is the monotonic clock, in seconds."""
    time_left = to_seconds(submit.time_left) if submit.HasField("time_left") else None
    return Request(
        key=submit.key,
        prompt=list(submit.prompt_token_ids),
        n=submit.n,
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        min_tokens=submit.sampling.min_tokens,
        sampling=_sampling_from_proto(submit),
        has_stop_strings=submit.has_stop_strings,
        priority=submit.priority,
        tenant=submit.tenant,
        weight=submit.weight or 1.0,
        salt=submit.cache_salt,
        arrived_at=now,
        deadline=None if time_left is None else now + time_left,
        traceparent=submit.traceparent,
        beam=_beam_from_proto(submit) if submit.HasField("beam_search") else None,
    )


def _sampling_from_proto(submit: scheduler_v1.Submit) -> worker_v1.SamplingParams:
    if not submit.HasField("beam_search"):
        return submit.sampling
    sampling = worker_v1.SamplingParams()
    sampling.CopyFrom(submit.sampling)
    needed = num_candidates(submit.beam_search.width, len(submit.stop_token_ids))
    sampling.logprobs = max(needed, sampling.logprobs)
    return sampling


def _beam_from_proto(submit: scheduler_v1.Submit) -> BeamParams:
    search = submit.beam_search
    return BeamParams(
        width=search.width,
        length_penalty=search.length_penalty,
        early_stopping=_EARLY_STOPPINGS.get(search.early_stopping, EarlyStopping.HEURISTIC),
        logprobs=submit.sampling.logprobs if submit.sampling.HasField("logprobs") else None,
    )


def shape_from_proto(description: worker_v1.DescribeResponse) -> ReplicaShape:
    """What scheduling needs of a worker's description."""
    return ReplicaShape(
        fingerprint=description.fingerprint,
        block_size=description.block_size,
        num_blocks=description.num_blocks,
        context_length=description.context_length,
        max_step_tokens=description.max_step_tokens,
        max_sequences=description.max_sequences,
        num_host_blocks=description.num_host_blocks,
        block_bytes=description.block_bytes,
        swap_bytes_per_second=description.swap_bytes_per_second,
        prefill_tokens_per_second=description.prefill_tokens_per_second,
        max_new_tokens=max(1, description.max_new_tokens),
    )


def plan_to_proto(plan: StepPlan, epoch: int, generation: int) -> worker_v1.StepRequest:
    """A step as the worker is told of it."""
    return worker_v1.StepRequest(
        epoch=epoch,
        generation=generation,
        step_id=plan.step_id,
        finished_ids=plan.finished_ids,
        swap_out=_pairs_to_proto(plan.swap_out, Direction.OUT),
        swap_in=_pairs_to_proto(plan.swap_in, Direction.IN),
        copies=_copies_to_proto([copy.source for copy in plan.copies], [copy.destination for copy in plan.copies]),
        block_table_updates=[
            worker_v1.BlockTableUpdate(sequence_id=change.sequence_id, index=change.index, block_id=change.block_id)
            for change in plan.block_table_updates
        ],
        new_sequences=[
            worker_v1.NewSequence(
                sequence_id=new.sequence.id,
                token_ids=new.tokens,
                prompt_length=len(new.sequence.request.prompt),
                index=new.sequence.index,
                sampling=cast(worker_v1.SamplingParams, new.sequence.request.sampling),
                traceparent=_traceparent(new.sequence),
            )
            for new in plan.new_sequences
        ],
        scheduled=_schedule_to_proto(plan.scheduled),
        block_hashes=_block_hashes_to_proto(plan.block_hashes),
        host_block_hashes=_block_hashes_to_proto(plan.host_block_hashes),
    )


def _block_hashes_to_proto(block_hashes: list[BlockHash]) -> worker_v1.BlockHashes | None:
    if not block_hashes:
        return None
    return worker_v1.BlockHashes(
        block_ids=[block for block, _ in block_hashes], hashes=[block_hash for _, block_hash in block_hashes]
    )


def hash_report_from_proto(hash_report: worker_v1.ReportBlockHashesResponse) -> BlockHashReport:
    """What a worker's blocks hold. Raises ValueError where the message's parts do not fit each other."""
    device, host = (
        dict(zip(tier.block_ids, tier.hashes, strict=True)) for tier in (hash_report.device, hash_report.host)
    )
    return BlockHashReport(device, host)


def _traceparent(sequence: Sequence) -> str:
    # One span for a request's stay at a worker, however many sequences it has, and however often beams are told anew.
    if sequence.index or sequence.is_one_of_beams:
        return ""
    return sequence.request.traceparent


def _pairs_to_proto(pairs: list[BlockPair], direction: Direction) -> worker_v1.BlockCopies | None:
    device, host = [pair.device for pair in pairs], [pair.host for pair in pairs]
    return _copies_to_proto(device, host) if direction is Direction.OUT else _copies_to_proto(host, device)


def _copies_to_proto(sources: list[int], destinations: list[int]) -> worker_v1.BlockCopies | None:
    return worker_v1.BlockCopies(sources=sources, destinations=destinations) if sources else None


def _schedule_to_proto(scheduled: list[ScheduledSequence]) -> worker_v1.Schedule:
    if not scheduled:
        return worker_v1.Schedule()
    sequences, starts, num_tokens, new_block_ids, cached_tokens, _, max_extra_tokens = zip(*scheduled, strict=True)
    return worker_v1.Schedule(
        sequence_ids=[sequence.id for sequence in sequences],
        starts=starts,
        num_tokens=num_tokens,
        num_new_blocks=map(len, new_block_ids),
        new_block_ids=chain.from_iterable(new_block_ids),
        cached_tokens=[
            worker_v1.CachedTokens(schedule_index=schedule_index, num_cached_tokens=part.num_cached_tokens)
            for schedule_index, part in enumerate(scheduled)
            if part.num_cached_tokens > part.start
        ]
        if starts != cached_tokens
        else (),
        max_extra_tokens=max_extra_tokens if any(max_extra_tokens) else (),
    )


class SequenceResult(NamedTuple):
    """A worker's result for one scheduled sequence."""

    token_ids: Seq[int]
    logprobs: Seq[object]
    failure: str | None


_DIRECTIONS = {worker_v1.DIRECTION_OUT: Direction.OUT, worker_v1.DIRECTION_IN: Direction.IN}


def outcome_from_proto(result: worker_v1.StepResult) -> StepOutcome:
    """What came of a step. Raises ValueError where the message's parts do not fit each other."""
    swaps = []
    for done in result.swaps:
        if done.direction not in _DIRECTIONS:
            raise ValueError("a transfer in no direction")
        failure = done.failure if done.HasField("failure") else None
        swaps.append(SwapDone(done.step_id, _DIRECTIONS[done.direction], done.duration_us / 1e6, failure))
    return StepOutcome(results_from_proto(result), swaps, result.busy_us / 1e6)


def results_from_proto(result: worker_v1.StepResult) -> list[SequenceResult]:
    """The results of a step's sequences. Raises ValueError where the message's parts do not fit each other."""
    counts, tokens = result.num_tokens[:], result.token_ids[:]
    if len(counts) != len(result.sequence_ids) or sum(counts) != len(tokens):
        raise ValueError("columns of different lengths")
    logprobs: list[Seq[object]] = [()] * len(counts)
    failures: list[str | None] = [None] * len(counts)
    try:
        for part in result.logprobs:
            logprobs[part.schedule_index] = part.tokens
        for failure in result.failures:
            failures[failure.schedule_index] = failure.message
    except IndexError:
        raise ValueError("a part of a sequence that is not there") from None
    rows: Iterable[tuple[int, ...]]
    if counts.count(1) == len(counts):  # decodes, mostly
        rows = zip(tokens, strict=True)
    else:
        rows = (tuple(tokens[end - count : end]) for count, end in zip(counts, accumulate(counts), strict=True))
    # Hundreds of them a step: made without a call of Python for each.
    make = partial(tuple.__new__, SequenceResult)
    return list(map(make, zip(rows, logprobs, failures, strict=True)))


def message_of(*events: scheduler_v1.Event) -> scheduler_v1.SessionResponse:
    """A message to a gateway. Its epoch is the session's to set."""
    return scheduler_v1.SessionResponse(events=events)


def event_to_proto(event: Event) -> scheduler_v1.Event:
    """What happened to a request, as its gateways are told."""
    message = scheduler_v1.Event()
    fill_event(message, event)
    return message


def fill_event(message: scheduler_v1.Event, event: Event) -> None:
    """The same of an empty event that stands in a message already: one made apart would be copied into it."""
    if isinstance(event, FailedEvent):
        message.CopyFrom(failed_to_proto(event.request.key, event.reason, event.message, event.retry_after))
        return
    sequence = event.sequence
    message.key = sequence.request.key
    tokens = message.tokens
    # Hundreds of them a step: fields are set one by one, and only those that say something.
    tokens.token_ids.extend(event.token_ids)
    if sequence.index:
        tokens.index = sequence.index
    if event.offset:
        tokens.offset = event.offset
    elif sequence.num_cached is not None:
        tokens.cached_tokens = sequence.num_cached
    if event.logprobs:
        tokens.logprobs.extend(logprobs_to_proto(event.logprobs))
    if event.end is not None:
        tokens.end.CopyFrom(end_to_proto(event.end))
    if event.score is not None:
        tokens.score = event.score


def reason_to_proto(failure: Failure) -> scheduler_v1.FailureReason:
    """Why a request failed, as it is told and recorded."""
    return _FAILURES[failure]


def reason_from_proto(reason: scheduler_v1.FailureReason | None) -> Failure:
    """Why a recorded request failed; where the record does not say, it was a fault of ours."""
    return Failure.INTERNAL if reason is None else _REASONS.get(reason, Failure.INTERNAL)


def failed_to_proto(
    key: str,
    reason: Failure,
    message: str,
    retry_after: float | None = None,
    attachment_id: int | None = None,
) -> scheduler_v1.Event:
    """That the request of this key is over, or never was; `retry_after` is in seconds.

    With an `attachment_id`: that this submission or attachment is refused, whatever becomes of the request.
    """
    failed = scheduler_v1.Failed(reason=reason_to_proto(reason), message=message)
    if retry_after is not None:
        failed.retry_after.CopyFrom(to_duration(retry_after))
    return scheduler_v1.Event(key=key, failed=failed, attachment_id=attachment_id)


def accepted_to_proto(log: RequestLog, attachment_id: int) -> scheduler_v1.Event:
    """That a request is queued."""
    accepted = scheduler_v1.Accepted(is_durable=log.is_recorded)
    return scheduler_v1.Event(key=log.key, accepted=accepted, attachment_id=attachment_id)


def attached_to_proto(log: RequestLog, attachment_id: int) -> scheduler_v1.Event:
    """All that a gateway needs to go on with a request."""
    submit = log.submit
    attached = scheduler_v1.Attached(
        render_options=submit.render_options,
        prompt_length=len(submit.prompt_token_ids),
        sequences=[_tokens_of(log, index, 0) for index in range(len(log.sequences))],
        submission_id=submit.submission_id,
        detachable=submit.detachable,
        seed=submit.sampling.seed,
        num_sequences=submit.n,
    )
    return scheduler_v1.Event(key=log.key, attached=attached, attachment_id=attachment_id)


def tokens_to_proto(log: RequestLog, index: int, offset: int) -> scheduler_v1.Event:
    """What a log has of a sequence from `offset` on."""
    return scheduler_v1.Event(key=log.key, tokens=_tokens_of(log, index, offset))


def _tokens_of(log: RequestLog, index: int, offset: int) -> scheduler_v1.Tokens:
    sequence = log.sequences[index]
    return scheduler_v1.Tokens(
        index=index,
        offset=offset,
        token_ids=sequence.token_ids[offset:],
        logprobs=sequence.logprobs[offset:],
        cached_tokens=sequence.cached_tokens if offset == 0 and sequence.token_ids else None,
        end=sequence.end,
        score=sequence.score,
    )


def logprobs_to_proto(logprobs: Seq[object]) -> Iterable[worker_v1.TokenLogprobs]:
    """A worker's own messages go on as they are; a search's choices become such messages."""
    if not logprobs or not isinstance(logprobs[0], Choice):
        return cast("Iterable[worker_v1.TokenLogprobs]", logprobs)
    return [
        worker_v1.TokenLogprobs(logprob=choice.logprob, top=cast("Iterable[worker_v1.Logprob]", choice.top))
        for choice in cast("Iterable[Choice]", logprobs)
    ]


def end_to_proto(end: StopToken | MaxTokens) -> scheduler_v1.SequenceEnd:
    """How a sequence ended."""
    if isinstance(end, StopToken):
        return scheduler_v1.SequenceEnd(stop_token_id=end.token_id)
    return scheduler_v1.SequenceEnd(length=scheduler_v1.Length())
