"""What gateways hold of a request, made one with its log: what a client was given is the truth.

Everything here is a function of the log and the tail; nothing of it waits or tells anybody.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.request_log import RequestLog, SequenceLog


class Diverged(Exception):  # noqa: N818
    """A tail cannot be reconciled with its log. The text holds no tokens."""


@dataclass(frozen=True, slots=True)
class LogChange:
    """A sequence has other tokens from `offset` on; `is_truncated` says that it lost some, or its end."""

    index: int
    offset: int
    is_truncated: bool


def complete(log: RequestLog) -> None:
    """Give a log from the store what follows from what it has: a place for each sequence, ends that tokens tell of."""
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
    """How a sequence with these tokens ended, by the request's own limits; None: it goes on."""
    if not token_ids:
        return None
    if len(token_ids) > submit.sampling.min_tokens and token_ids[-1] in submit.stop_token_ids:
        return scheduler_v1.SequenceEnd(stop_token_id=token_ids[-1])
    if len(token_ids) >= submit.max_tokens:
        return scheduler_v1.SequenceEnd(length=scheduler_v1.Length())
    return None


def truncate(log: RequestLog, index: int, num_tokens: int) -> bool:
    """End a sequence by a stop string at its first `num_tokens`. False: there is nothing to cut."""
    if index >= len(log.sequences) or log.submit.HasField("beam_search"):
        return False
    sequence = log.sequences[index]
    if num_tokens > len(sequence.token_ids) or (_is_by_string(sequence) and num_tokens == len(sequence.token_ids)):
        return False
    _truncate(sequence, num_tokens)
    sequence.end = _stop_string()
    return True


def merge(
    log: RequestLog, unflushed: Iterable[scheduler_v1.UnflushedTokens], num_delivered: Sequence[int]
) -> list[LogChange]:
    """Take in what a gateway holds; returns what of the log is new, in no case anything that it had already.

    `num_delivered` is how many tokens of each sequence were sent to other gateways since the log was read; these stay.
    Raises Diverged, and changes nothing, where the unflushed tokens contradict them or begin beyond what is known.
    Those of a beam search are ignored: it starts again from its prompt.
    """
    if log.submit.HasField("beam_search"):
        return []
    merges = {
        unflushed.index: found
        for unflushed in unflushed
        if (found := _compare(log, unflushed, num_delivered)) is not None
    }
    changes = []
    for index, (num_kept, token_ids, logprobs, ends) in merges.items():
        sequence = log.sequences[index]
        is_truncated = num_kept < len(sequence.token_ids) or sequence.end is not None
        _truncate(sequence, num_kept)
        sequence.token_ids += token_ids
        sequence.logprobs += logprobs
        sequence.end = _stop_string() if ends else end_of(log.submit, sequence.token_ids)
        changes.append(LogChange(index, num_kept, is_truncated))
    return changes


class _Merge(NamedTuple):
    """How many tokens stand, what comes behind them, and whether a stop string ends it there."""

    num_kept: int
    token_ids: Sequence[int]
    logprobs: Sequence[worker_v1.TokenLogprobs]
    ends: bool


def _compare(log: RequestLog, unflushed: scheduler_v1.UnflushedTokens, num_delivered: Sequence[int]) -> _Merge | None:
    """What a tail changes; None: nothing."""
    _check(log, unflushed)
    sequence, theirs = log.sequences[unflushed.index], list(unflushed.token_ids)
    ours = sequence.token_ids[unflushed.offset :]
    pairs = enumerate(zip(ours, theirs, strict=False))
    num_same = next((place for place, (our, their) in pairs if our != their), min(len(ours), len(theirs)))
    num_kept = unflushed.offset + num_same
    if num_same == len(theirs):  # the log has it all
        is_known = not unflushed.is_truncated or (_is_by_string(sequence) and num_same == len(ours))
        return None if is_known else _Merge(num_kept, (), (), ends=True)
    if num_same == len(ours) and _is_by_string(sequence):
        return None  # another gateway has found the stop string that this one has yet to look for
    if num_same < len(ours) and num_delivered[unflushed.index] > num_kept:
        raise Diverged("other gateways were given other tokens")
    return _Merge(num_kept, theirs[num_same:], list(unflushed.logprobs)[num_same:], unflushed.is_truncated)


def _check(log: RequestLog, unflushed: scheduler_v1.UnflushedTokens) -> None:
    if unflushed.index >= len(log.sequences):
        raise Diverged("there is no such sequence")
    if unflushed.offset > len(log.sequences[unflushed.index].token_ids):
        raise Diverged("tokens are missing between what is known and what the gateway holds")
    if unflushed.offset + len(unflushed.token_ids) > log.submit.max_tokens:
        raise Diverged("the gateway holds more tokens than were asked for")
    if len(unflushed.logprobs) != (len(unflushed.token_ids) if log.submit.sampling.HasField("logprobs") else 0):
        raise Diverged("the gateway holds log-probabilities of other tokens")


def _is_by_string(sequence: SequenceLog) -> bool:
    return sequence.end is not None and sequence.end.HasField("stop_string")


def _stop_string() -> scheduler_v1.SequenceEnd:
    return scheduler_v1.SequenceEnd(stop_string=scheduler_v1.StopString())


def _truncate(sequence: SequenceLog, num_tokens: int) -> None:
    del sequence.token_ids[num_tokens:]
    del sequence.logprobs[num_tokens:]
    sequence.end = None
    sequence.num_durable = min(sequence.num_durable, num_tokens)
    sequence.is_end_durable = False
