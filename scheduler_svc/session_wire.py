"""Between the core's values, a request's log, and the messages of the session stream."""

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import cast

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.account_limits import NO_LIMITS, AccountLimits
from scheduler_svc.core.beam_search import Choice, num_candidates
from scheduler_svc.core.events import (
    End,
    Event,
    FailedEvent,
    Failure,
    PromptLogprobsEvent,
    StopToken,
    TokensEvent,
    ValueComputed,
)
from scheduler_svc.core.request import BeamParams, EarlyStopping, Request
from scheduler_svc.core.results import TOKENS, ResultForm
from scheduler_svc.request_log import RequestLog
from scheduler_svc.result_kinds import kind_from_proto
from scheduler_svc.store.base import IncompleteRecord, MalformedRecord, UndecryptableRecord, UnusableRecord
from svc_common.durations import to_duration

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
    Failure.UNSUPPORTED_RESULT: scheduler_v1.FAILURE_REASON_UNSUPPORTED_RESULT,
    Failure.RECORD_INCOMPLETE: scheduler_v1.FAILURE_REASON_RECORD_INCOMPLETE,
    Failure.RECORD_UNDECRYPTABLE: scheduler_v1.FAILURE_REASON_RECORD_UNDECRYPTABLE,
    Failure.PROMPT_TOO_COSTLY: scheduler_v1.FAILURE_REASON_PROMPT_TOO_COSTLY,
    Failure.GRAMMAR_TOO_COMPLEX: scheduler_v1.FAILURE_REASON_GRAMMAR_TOO_COMPLEX,
}
_REASONS = {reason: failure for failure, reason in _FAILURES.items()}

_EARLY_STOPPINGS = {
    scheduler_v1.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    scheduler_v1.EARLY_STOPPING_AT_WIDTH: EarlyStopping.AT_WIDTH,
    scheduler_v1.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def request_from_log(log: RequestLog, now: float) -> Request:
    """A request for the core; `now` is the monotonic clock, in seconds.

    It arrived when it was accepted, maybe by an earlier leader: a takeover does not change the order of requests.
    """
    wall = time.time()
    deadline = None if log.deadline is None else now + max(0.0, log.deadline - wall)
    return request_from_proto(log.submit, now - (wall - log.accepted_at), deadline)


def request_from_proto(submit: scheduler_v1.Submit, arrived_at: float, deadline: float | None = None) -> Request:
    """A request for the core; `arrived_at` and `deadline` are on the monotonic clock, in seconds."""
    result = kind_from_proto(submit.result) if submit.HasField("result") else TOKENS
    return Request(
        key=submit.key,
        prompt=list(submit.prompt_token_ids),
        n=submit.n,
        max_tokens=submit.max_tokens + (result.form is ResultForm.VALUE),  # the value counts as a token
        stop_token_ids=frozenset(submit.stop_token_ids),
        min_tokens=submit.sampling.min_tokens,
        sampling=_sampling_from_proto(submit),
        has_stop_strings=submit.has_stop_strings,
        priority=submit.priority,
        tenant=submit.tenant,
        weight=submit.weight or 1.0,
        salt=submit.cache_salt,
        arrived_at=arrived_at,
        deadline=deadline,
        traceparent=submit.traceparent,
        protocol=_protocol_of(submit.sampling),
        beam=_beam_from_proto(submit) if submit.HasField("beam_search") else None,
        result=result,
        result_params=submit.result,
        limits=_limits_from_proto(submit.limits) if submit.HasField("limits") else NO_LIMITS,
    )


def _protocol_of(sampling: worker_v1.SamplingParams) -> int:
    """The oldest step protocol that has all of these parameters."""
    later = (
        sampling.typical_p,
        sampling.grammar,
        sampling.allowed_token_ids,
        sampling.bad_words,
        sampling.logprob_token_ids,
    )
    return 2 if any(later) else 1


def protocol_to_render(options: scheduler_v1.RenderOptions) -> int:
    """The oldest session protocol of gateways that return a request as its client asked for it."""
    later = (
        options.logprob_token_ids,
        options.joins_special_tokens,
        options.echo,
        options.HasField("prompt_logprobs"),
        options.omits_output,
        any(tool.is_custom for tool in options.turn.callable),
    )
    if any(later):
        return 3
    return 2 if options.HasField("turn") else 1


def _limits_from_proto(limits: scheduler_v1.AccountLimits) -> AccountLimits:
    return AccountLimits(
        account=limits.account,
        max_running=limits.max_running if limits.HasField("max_running") else None,
        max_queued=limits.max_queued if limits.HasField("max_queued") else None,
        max_kv_blocks=limits.max_kv_blocks if limits.HasField("max_kv_blocks") else None,
        tokens_per_minute=limits.tokens_per_minute if limits.HasField("tokens_per_minute") else None,
        requests_per_minute=limits.requests_per_minute if limits.HasField("requests_per_minute") else None,
        cached_token_factor=limits.cached_token_factor if limits.HasField("cached_token_factor") else 1.0,
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


def message_of(epoch: int, *events: scheduler_v1.Event) -> scheduler_v1.SessionResponse:
    """A message to a gateway."""
    return scheduler_v1.SessionResponse(epoch=epoch, events=events)


def event_to_proto(event: Event) -> scheduler_v1.Event:
    message = scheduler_v1.Event()
    fill_event(message, event)
    return message


def fill_event(message: scheduler_v1.Event, event: Event, fingerprint: bytes = b"") -> None:
    """Fills an empty event that is part of a message already: a separate one would be copied into it.

    `fingerprint` is of the version of the model that computed the tokens.
    """
    if not isinstance(event, TokensEvent):
        _fill_rare_event(message, event)
        return
    sequence = event.sequence
    message.key = sequence.request.key
    tokens = message.tokens
    # Hundreds in each step: fields are set one by one, and only those that differ from the default.
    tokens.token_ids.extend(event.token_ids)
    if sequence.index:
        tokens.index = sequence.index
    if event.offset:
        tokens.offset = event.offset
    else:
        tokens.model_fingerprint = fingerprint
        if sequence.num_cached_prompt_tokens is not None:
            tokens.cached_tokens = sequence.num_cached_prompt_tokens
    if event.logprobs:
        tokens.logprobs.extend(logprobs_to_proto(event.logprobs))
    if event.end is not None:
        tokens.end.CopyFrom(end_to_proto(event.end))
    if event.score is not None:
        tokens.score = event.score


def _fill_rare_event(message: scheduler_v1.Event, event: PromptLogprobsEvent | FailedEvent) -> None:
    if isinstance(event, FailedEvent):
        message.CopyFrom(failed_to_proto(event.request.key, event.reason, event.message, event.retry_after))
        return
    message.key = event.request.key
    message.prompt_logprobs.offset = event.offset
    message.prompt_logprobs.tokens.extend(cast("Seq[worker_v1.TokenLogprobs]", event.logprobs))


def reason_to_proto(failure: Failure) -> scheduler_v1.FailureReason:
    return _FAILURES[failure]


def failure_of_record(error: UnusableRecord) -> Failure:
    """Why a request with such a record is refused. A later release may read what this one does not support."""
    match error:
        case IncompleteRecord() | MalformedRecord():
            return Failure.RECORD_INCOMPLETE
        case UndecryptableRecord():
            return Failure.RECORD_UNDECRYPTABLE
    return Failure.UNAVAILABLE


def reason_from_proto(reason: scheduler_v1.FailureReason | None) -> Failure:
    """Why a recorded request failed; an internal error where the record has no reason."""
    return Failure.INTERNAL if reason is None else _REASONS.get(reason, Failure.INTERNAL)


def failed_to_proto(
    key: str,
    reason: Failure,
    message: str,
    retry_after: float | None = None,
    command_id: int | None = None,
) -> scheduler_v1.Event:
    """The event that a request has failed, or does not exist; `retry_after` is in seconds.

    With an `command_id` it refuses that Submit or Attach, and does not concern the request itself.
    """
    failed = scheduler_v1.Failed(reason=reason_to_proto(reason), message=message)
    if retry_after is not None:
        failed.retry_after.CopyFrom(to_duration(retry_after))
    return scheduler_v1.Event(key=key, failed=failed, command_id=command_id)


def accepted_to_proto(log: RequestLog, command_id: int) -> scheduler_v1.Event:
    """The event that a request is queued."""
    accepted = scheduler_v1.Accepted(is_durable=log.is_recorded)
    return scheduler_v1.Event(key=log.key, accepted=accepted, command_id=command_id)


def attached_message(epoch: int, log: RequestLog, command_id: int) -> scheduler_v1.SessionResponse:
    """The message with all that a gateway needs to continue a request.

    It may have tens of megabytes of log-probabilities: it is filled in place, since each part that is made by itself
    would be copied into it.
    """
    message = scheduler_v1.SessionResponse(epoch=epoch)
    event = message.events.add(key=log.key, command_id=command_id)
    _fill_attached(event.attached, log)
    return message


def record_message(epoch: int, log: RequestLog, command_id: int) -> scheduler_v1.SessionResponse:
    """The message with a request as it is now."""
    message = scheduler_v1.SessionResponse(epoch=epoch)
    record = message.events.add(key=log.key, command_id=command_id).record
    _fill_attached(record.attached, log)
    record.attachment = log.submit.attachment
    if log.is_over:
        record.ended_at.FromNanoseconds(round(1e9 * (log.ended_at or 0.0)))
    if log.failure is not None:
        record.failed.reason = log.failure
        record.failed.message = f"the request has ended: {log.state}"
    return message


def _fill_attached(attached: scheduler_v1.Attached, log: RequestLog) -> None:
    submit = log.submit
    options = submit.render_options
    returns_prompt = options.echo or options.HasField("prompt_logprobs")
    attached.render_options.CopyFrom(submit.render_options)
    attached.prompt_length = len(submit.prompt_token_ids)
    for index in range(len(log.sequences)):
        _fill_tokens(attached.sequences.add(), log, index, 0)
    attached.submission_id = submit.submission_id
    attached.detachable = submit.detachable
    attached.seed = submit.sampling.seed
    attached.num_sequences = submit.n
    attached.tokenizer_fingerprint = submit.tokenizer_fingerprint
    if log.prompt_logprobs:
        _fill_prompt_logprobs(attached.prompt_logprobs, log, 0)
    attached.is_durable = log.is_recorded
    if submit.HasField("retention"):
        attached.retention.CopyFrom(submit.retention)
    if returns_prompt:
        attached.prompt_token_ids.extend(submit.prompt_token_ids)


def tokens_to_proto(log: RequestLog, index: int, offset: int) -> scheduler_v1.Event:
    """The tokens of a sequence from `offset` on."""
    event = scheduler_v1.Event(key=log.key)
    _fill_tokens(event.tokens, log, index, offset)
    return event


def prompt_logprobs_to_proto(log: RequestLog, first: int) -> scheduler_v1.Event:
    """The log-probabilities of the prompt, from position `first` + 1 on."""
    event = scheduler_v1.Event(key=log.key)
    _fill_prompt_logprobs(event.prompt_logprobs, log, first)
    return event


def prompt_paid_to_proto(log: RequestLog) -> scheduler_v1.Event:
    """The event with what a request's prompt has cost."""
    return scheduler_v1.Event(key=log.key, prompt_paid=scheduler_v1.PromptPaid(num_tokens=log.prompt_cost))


def _fill_prompt_logprobs(message: scheduler_v1.PromptLogprobs, log: RequestLog, first: int) -> None:
    message.offset = first + 1
    message.tokens.extend(log.prompt_logprobs[first:])


def _fill_tokens(tokens: scheduler_v1.Tokens, log: RequestLog, index: int, offset: int) -> None:
    sequence = log.sequences[index]
    tokens.index = index
    tokens.offset = offset
    tokens.token_ids.extend(sequence.token_ids[offset:])
    tokens.logprobs.extend(sequence.logprobs[offset:])
    if offset == 0 and (sequence.token_ids or sequence.end):
        tokens.cached_tokens = sequence.cached_tokens
        tokens.model_fingerprint = log.fingerprint
    if sequence.end is not None:
        tokens.end.CopyFrom(sequence.end)
    if sequence.score is not None:
        tokens.score = sequence.score


def logprobs_to_proto(logprobs: Seq[object]) -> Iterable[worker_v1.TokenLogprobs]:
    """A worker's own messages unchanged, or the choices of a search as such messages."""
    if not logprobs or not isinstance(logprobs[0], Choice):
        return cast("Iterable[worker_v1.TokenLogprobs]", logprobs)
    return [
        worker_v1.TokenLogprobs(logprob=choice.logprob, top=cast("Iterable[worker_v1.Logprob]", choice.top))
        for choice in cast("Iterable[Choice]", logprobs)
    ]


def end_to_proto(end: End) -> scheduler_v1.SequenceEnd:
    if isinstance(end, StopToken):
        return scheduler_v1.SequenceEnd(stop_token_id=end.token_id)
    if isinstance(end, ValueComputed):
        return scheduler_v1.SequenceEnd(value=cast(worker_v1.PromptValue, end.value))
    return scheduler_v1.SequenceEnd(length=scheduler_v1.Length())
