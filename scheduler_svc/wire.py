"""Between the core's values and the messages of both streams."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.plan import (
    Event,
    FailedEvent,
    Failure,
    MaxTokens,
    Scheduled,
    StepPlan,
    StopToken,
    TokensEvent,
)
from scheduler_svc.core.replica import ReplicaShape
from scheduler_svc.core.sequence import Request

_FAILURES = {
    Failure.KEY_IN_USE: scheduler_v1.FAILURE_REASON_KEY_IN_USE,
    Failure.DEADLINE_EXCEEDED: scheduler_v1.FAILURE_REASON_DEADLINE_EXCEEDED,
    Failure.CANCELLED: scheduler_v1.FAILURE_REASON_CANCELLED,
    Failure.INVALID: scheduler_v1.FAILURE_REASON_INVALID,
    Failure.CONTEXT_LENGTH_EXCEEDED: scheduler_v1.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED,
    Failure.UNAVAILABLE: scheduler_v1.FAILURE_REASON_UNAVAILABLE,
    Failure.INTERNAL: scheduler_v1.FAILURE_REASON_INTERNAL,
}


def request_from_proto(submit: scheduler_v1.Submit, now: float) -> Request:
    """A request as the core knows it; `now` is the monotonic clock, in seconds."""
    time_left = submit.time_left.ToTimedelta().total_seconds() if submit.HasField("time_left") else None
    return Request(
        key=submit.key,
        prompt=list(submit.prompt_token_ids),
        n=submit.n,
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        min_tokens=submit.sampling.min_tokens,
        sampling=submit.sampling,
        has_stop_strings=submit.has_stop_strings,
        priority=submit.priority,
        tenant=submit.tenant,
        weight=submit.weight,
        salt=submit.cache_salt,
        deadline=None if time_left is None else now + time_left,
        traceparent=submit.traceparent,
    )


def shape_from_proto(about: worker_v1.DescribeResponse) -> ReplicaShape:
    """What scheduling needs of a worker's description."""
    return ReplicaShape(
        fingerprint=about.fingerprint,
        block_size=about.block_size,
        num_blocks=about.num_blocks,
        context_length=about.context_length,
        max_step_tokens=about.max_step_tokens,
        max_sequences=about.max_sequences,
    )


def plan_to_proto(plan: StepPlan, epoch: int, generation: int) -> worker_v1.StepRequest:
    """A step as the worker is told of it."""
    return worker_v1.StepRequest(
        epoch=epoch,
        generation=generation,
        step_id=plan.step_id,
        finished_ids=plan.departed_ids,
        new_sequences=[
            worker_v1.NewSequence(
                sequence_id=new.sequence.id,
                token_ids=new.tokens,
                prompt_length=len(new.sequence.request.prompt),
                index=new.sequence.index,
                sampling=cast(worker_v1.SamplingParams, new.sequence.request.sampling),
                # One span for a request's stay at a worker, however many sequences it has.
                traceparent=new.sequence.request.traceparent if new.sequence.index == 0 else "",
            )
            for new in plan.introductions
        ],
        scheduled=_schedule_to_proto(plan.scheduled),
    )


def _schedule_to_proto(scheduled: list[Scheduled]) -> worker_v1.Schedule:
    return worker_v1.Schedule(
        sequence_ids=[part.sequence.id for part in scheduled],
        starts=[part.start for part in scheduled],
        num_tokens=[part.num_tokens for part in scheduled],
        num_new_blocks=[len(part.new_block_ids) for part in scheduled],
        new_block_ids=[block_id for part in scheduled for block_id in part.new_block_ids],
        store_starts=[
            worker_v1.StoreStart(place=place, store_start=part.store_start)
            for place, part in enumerate(scheduled)
            if part.store_start > part.start
        ],
    )


@dataclass(slots=True)
class SequenceResult:
    """A worker's result for one scheduled sequence."""

    token_ids: list[int]
    logprobs: Seq[object] = ()
    failure: str | None = None


def results_from_proto(result: worker_v1.StepResult) -> list[SequenceResult]:
    """The results of a step's sequences. Raises ValueError where the message's parts do not fit each other."""
    counts, tokens = list(result.num_tokens), list(result.token_ids)
    if len(counts) != len(result.sequence_ids) or sum(counts) != len(tokens):
        raise ValueError("columns of different lengths")
    if counts.count(1) == len(counts):  # decodes, mostly
        results = [SequenceResult([token]) for token in tokens]
    else:
        ends = accumulate(counts)
        results = [SequenceResult(tokens[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    places = [part.place for part in result.logprobs] + [part.place for part in result.failures]
    if any(place >= len(results) for place in places):
        raise ValueError("a part of a sequence that is not there")
    for logprobs in result.logprobs:
        results[logprobs.place].logprobs = logprobs.tokens
    for failure in result.failures:
        results[failure.place].failure = failure.message
    return results


def event_to_proto(event: Event) -> scheduler_v1.Event:
    """What happened to a request, as its gateway is told."""
    if isinstance(event, FailedEvent):
        return failed_to_proto(event.request.key, event.reason, event.message)
    return scheduler_v1.Event(key=event.sequence.request.key, tokens=_tokens_to_proto(event))


def failed_to_proto(key: str, reason: Failure, message: str) -> scheduler_v1.Event:
    """That the request of this key is over, or never was."""
    return scheduler_v1.Event(key=key, failed=scheduler_v1.Failed(reason=_FAILURES[reason], message=message))


def _tokens_to_proto(event: TokensEvent) -> scheduler_v1.Tokens:
    end = None
    if isinstance(event.end, StopToken):
        end = scheduler_v1.SequenceEnd(stop_token_id=event.end.token_id)
    elif isinstance(event.end, MaxTokens):
        end = scheduler_v1.SequenceEnd(length=scheduler_v1.Length())
    return scheduler_v1.Tokens(
        index=event.sequence.index,
        offset=event.offset,
        token_ids=event.token_ids,
        logprobs=cast("Iterable[worker_v1.TokenLogprobs]", event.logprobs),
        cached_tokens=event.sequence.num_cached if event.offset == 0 else None,
        end=end,
    )
