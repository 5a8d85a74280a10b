"""Merges a gateway's unflushed tokens into a request's log: a client may have received them, so the gateway is right.

Functions of the log and the tokens alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.results import ResultForm
from scheduler_svc.request_log import RequestLog, SequenceLog
from scheduler_svc.result_kinds import kind_from_proto


class Diverged(Exception):  # noqa: N818
    """Unflushed tokens that contradict the log. The text holds no tokens."""


@dataclass(frozen=True, slots=True)
class LogChange:
    """A sequence has other tokens from `offset` on. With `is_truncated` it lost tokens, or its end."""

    index: int
    offset: int
    is_truncated: bool


def complete(log: RequestLog) -> None:
    """Complete a log from the store: add missing sequences, and the ends that follow from the tokens."""
    if log.submit.HasField("beam_search"):
        return
    log.sequences += [SequenceLog() for _ in range(log.submit.n - len(log.sequences))]
    for sequence in log.sequences:
        if sequence.end is None:
            sequence.end = end_of(log.submit, sequence.token_ids)


def is_over(log: RequestLog) -> bool:
    """Whether all sequences have their end."""
    return bool(log.sequences) and all(sequence.end is not None for sequence in log.sequences)


def end_of(submit: scheduler_v1.Submit, token_ids: Sequence[int]) -> scheduler_v1.SequenceEnd | None:
    """The end of a sequence with these tokens, by the request's own limits; None: it has not ended."""
    if not token_ids:
        return None
    if len(token_ids) > submit.sampling.min_tokens and token_ids[-1] in submit.stop_token_ids:
        return scheduler_v1.SequenceEnd(stop_token_id=token_ids[-1])
    if len(token_ids) >= submit.max_tokens:
        return scheduler_v1.SequenceEnd(length=scheduler_v1.Length())
    return None


def truncate(log: RequestLog, index: int, num_tokens: int) -> bool:
    """Ends a sequence by a stop string after its first `num_tokens`. False: nothing changes."""
    if index >= len(log.sequences) or log.submit.HasField("beam_search") or _returns_value(log):
        return False
    sequence = log.sequences[index]
    if num_tokens > len(sequence.token_ids) or (_is_by_string(sequence) and num_tokens == len(sequence.token_ids)):
        return False
    sequence.truncate(num_tokens)
    sequence.end = _stop_string()
    return True


def merge(
    log: RequestLog, unflushed: Iterable[scheduler_v1.UnflushedTokens], num_delivered: Sequence[int]
) -> list[LogChange]:
    """Merges a gateway's unflushed tokens; returns the changes of the log.

    `num_delivered` is how many tokens of each sequence were sent to other gateways since the log was read; these stay.
    Raises Diverged, and changes nothing, where the unflushed tokens contradict them or begin beyond the log's. Those of
    a beam search are ignored: it starts again from its prompt. So are those of a value, which has no tokens.
    """
    if log.submit.HasField("beam_search") or _returns_value(log):
        return []
    unflushed = list(unflushed)
    prompt_logprobs = _prompt_logprobs_of(log, unflushed)
    merges = {
        unflushed.index: found
        for unflushed in unflushed
        if (found := _compare(log, unflushed, num_delivered)) is not None
    }
    changes = []
    log.prompt_logprobs += prompt_logprobs
    for index, (num_kept, token_ids, logprobs, ends) in merges.items():
        sequence = log.sequences[index]
        is_truncated = num_kept < len(sequence.token_ids) or sequence.end is not None
        sequence.truncate(num_kept)
        sequence.token_ids += token_ids
        sequence.logprobs += logprobs
        sequence.end = _stop_string() if ends else end_of(log.submit, sequence.token_ids)
        changes.append(LogChange(index, num_kept, is_truncated))
    return changes


def _prompt_logprobs_of(
    log: RequestLog, unflushed: Iterable[scheduler_v1.UnflushedTokens]
) -> Sequence[worker_v1.TokenLogprobs]:
    """The gateway's log-probabilities of the prompt that the log lacks. All of them precede the first token."""
    if not _has_prompt_logprobs(log):
        return ()
    num_known, num_due = len(log.prompt_logprobs), len(log.submit.prompt_token_ids) - 1
    first = next((one for one in unflushed if one.index == 0), None)
    new = first.prompt_logprobs[num_known:] if first is not None else ()
    if num_known + len(new) > num_due:
        raise Diverged("the gateway holds more log-probabilities of the prompt than it has tokens")
    if first is not None and first.token_ids and num_known + len(new) < num_due:
        raise Diverged("the gateway holds tokens, and not all log-probabilities of the prompt")
    return new


class _Merge(NamedTuple):
    """A sequence's first `num_kept` tokens, then these. With `ends`, a stop string ends it there."""

    num_kept: int
    token_ids: Sequence[int]
    logprobs: Sequence[worker_v1.TokenLogprobs]
    ends: bool


def _compare(log: RequestLog, unflushed: scheduler_v1.UnflushedTokens, num_delivered: Sequence[int]) -> _Merge | None:
    """The change that unflushed tokens make; None: nothing."""
    _check(log, unflushed)
    sequence, theirs = log.sequences[unflushed.index], list(unflushed.token_ids)
    ours = sequence.token_ids[unflushed.offset :]
    pairs = enumerate(zip(ours, theirs, strict=False))
    num_same = next((index for index, (our, their) in pairs if our != their), min(len(ours), len(theirs)))
    num_kept = unflushed.offset + num_same
    if num_same == len(theirs):  # the log has it all
        is_known = not unflushed.is_truncated or (_is_by_string(sequence) and num_same == len(ours))
        return None if is_known else _Merge(num_kept, (), (), ends=True)
    if num_same == len(ours) and _is_by_string(sequence):
        return None  # another gateway has found the stop string; this one has not searched there yet
    if num_same < len(ours) and num_delivered[unflushed.index] > num_kept:
        raise Diverged("other gateways were given other tokens")
    return _Merge(num_kept, theirs[num_same:], list(unflushed.logprobs)[num_same:], unflushed.is_truncated)


def _check(log: RequestLog, unflushed: scheduler_v1.UnflushedTokens) -> None:
    if unflushed.index >= len(log.sequences):
        raise Diverged("there is no such sequence")
    if unflushed.offset > len(log.sequences[unflushed.index].token_ids):
        raise Diverged("tokens are missing between what is known and what the gateway holds")
    if unflushed.offset + len(unflushed.token_ids) > log.submit.max_tokens:
        raise Diverged("the gateway holds more tokens than max_tokens")
    if len(unflushed.logprobs) != (len(unflushed.token_ids) if log.submit.sampling.HasField("logprobs") else 0):
        raise Diverged("the gateway holds log-probabilities of other tokens")


def _has_prompt_logprobs(log: RequestLog) -> bool:
    return _form_of(log) is ResultForm.TOKENS_AND_PROMPT_LOGPROBS


def _returns_value(log: RequestLog) -> bool:
    return _form_of(log) is ResultForm.VALUE


def _form_of(log: RequestLog) -> ResultForm:
    return kind_from_proto(log.submit.result).form if log.submit.HasField("result") else ResultForm.TOKENS


def _is_by_string(sequence: SequenceLog) -> bool:
    return sequence.end is not None and sequence.end.HasField("stop_string")


def _stop_string() -> scheduler_v1.SequenceEnd:
    return scheduler_v1.SequenceEnd(stop_string=scheduler_v1.StopString())
