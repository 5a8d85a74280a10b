"""What of a request's log is written next."""

from collections.abc import Sequence

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.request_log import RequestLog, SequenceLog
from scheduler_svc.store.base import Write


def has_pending_updates(sequence: SequenceLog) -> bool:
    return len(sequence.token_ids) > sequence.num_durable or (sequence.end is not None and not sequence.is_end_durable)


def weight_of(logprobs: Sequence[worker_v1.TokenLogprobs]) -> int:
    """The weight of each token, with its log-probabilities if there are any."""
    # A requested one has no token: 4 bytes.
    return 2 + len(logprobs[0].top) + len(logprobs[0].requested) // 2 if logprobs else 1


def weight_of_log(log: RequestLog) -> int:
    """The weight of a whole log in memory."""
    submit = log.submit
    weight = len(submit.prompt_token_ids) + len(submit.attachment) // 8
    weight += weight_of(log.prompt_logprobs) * len(log.prompt_logprobs)
    for one in log.sequences:
        num_bytes = one.end.ByteSize() if one.end is not None else 0  # an end may be a vector
        weight += weight_of(one.logprobs) * len(one.token_ids) + num_bytes // 8
    return weight


def num_pending_of_prompt(request: RequestLog, index: int) -> int:
    """How many log-probabilities of the prompt the store lacks. They are written with the first sequence."""
    return len(request.prompt_logprobs) - request.num_prompt_logprobs_durable if index == 0 else 0


def write_of(
    request: RequestLog, index: int, truncates: bool, limit: int, prompt_limit: int, *, is_whole: bool
) -> Write:
    """A write of at most `limit` tokens. The rest, and the end, go into a later write."""
    sequence = request.sequences[index]
    offset = sequence.num_durable
    stop = min(offset + limit, len(sequence.token_ids))
    prompt_offset = request.num_prompt_logprobs_durable if index == 0 else 0
    prompt_logprobs = request.prompt_logprobs[prompt_offset : prompt_offset + prompt_limit]
    return Write(
        request.key,
        request.submit.submission_id,
        index,
        offset,
        sequence.token_ids[offset:stop],
        [one.SerializeToString() for one in sequence.logprobs[offset:stop]] if sequence.logprobs else None,
        sequence.cached_tokens if offset == 0 else None,
        None if sequence.end is None or not is_whole else sequence.end.SerializeToString(),
        sequence.score if is_whole else None,
        truncates,
        request.fingerprint if offset == 0 else b"",
        prompt_offset,
        [one.SerializeToString() for one in prompt_logprobs],
        request.key_id,
    )
