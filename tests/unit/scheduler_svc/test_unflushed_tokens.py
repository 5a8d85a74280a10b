"""What a gateway holds against what the log has: which of them stands, and when nothing may."""

import pytest

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.request_log import RequestLog, SequenceLog
from scheduler_svc.unflushed_tokens import Diverged, LogChange, complete, is_over, merge, truncate

BY_STRING = scheduler_v1.SequenceEnd(stop_string=scheduler_v1.StopString())
BY_LENGTH = scheduler_v1.SequenceEnd(length=scheduler_v1.Length())


def log_of(*token_ids: list[int], logprobs: bool = False, num_durable: int = 0) -> RequestLog:
    submit = scheduler_v1.Submit(key="k", n=len(token_ids), max_tokens=8, stop_token_ids=[99])
    if logprobs:
        submit.sampling.logprobs = 0
    log = RequestLog(submit, accepted_at=1.0)
    log.sequences = [
        SequenceLog(list(tokens), [told(token) for token in tokens] if logprobs else [], num_durable=num_durable)
        for tokens in token_ids
    ]
    return log


def told(token: int) -> worker_v1.TokenLogprobs:
    return worker_v1.TokenLogprobs(logprob=-token)


def unflushed(
    offset: int, *token_ids: int, index: int = 0, is_truncated: bool = False, logprobs: bool = False
) -> scheduler_v1.UnflushedTokens:
    given = [told(token) for token in token_ids] if logprobs else []
    return scheduler_v1.UnflushedTokens(
        index=index, offset=offset, token_ids=token_ids, logprobs=given, is_truncated=is_truncated
    )


@pytest.mark.parametrize(
    "held", [unflushed(0), unflushed(3), unflushed(0, 1, 2, 3), unflushed(1, 2), unflushed(1, 2, 3)], ids=str
)
def test_what_the_log_has_changes_nothing(held: scheduler_v1.UnflushedTokens) -> None:
    log = log_of([1, 2, 3])
    assert merge(log, [held], [0]) == []
    assert log.sequences[0].token_ids == [1, 2, 3]


@pytest.mark.parametrize("held", [unflushed(3, 4, 5), unflushed(2, 3, 4, 5), unflushed(0, 1, 2, 3, 4, 5)], ids=str)
def test_what_goes_on_beyond_the_log_is_taken_in(held: scheduler_v1.UnflushedTokens) -> None:
    log = log_of([1, 2, 3], num_durable=2)
    assert merge(log, [held], [3]) == [LogChange(index=0, offset=3, is_truncated=False)]
    assert log.sequences[0].token_ids == [1, 2, 3, 4, 5]
    assert log.sequences[0].num_durable == 2


def test_what_says_otherwise_wins() -> None:
    log = log_of([1, 2, 3, 4], num_durable=4)
    assert merge(log, [unflushed(1, 2, 7)], [2]) == [LogChange(index=0, offset=2, is_truncated=True)]
    assert log.sequences[0].token_ids == [1, 2, 7]
    assert log.sequences[0].num_durable == 2


def test_what_others_were_given_stands() -> None:
    log = log_of([1, 2, 3, 4], [5, 6])
    with pytest.raises(Diverged):
        merge(log, [unflushed(2, 7, index=1), unflushed(1, 2, 7)], [3, 0])
    assert [sequence.token_ids for sequence in log.sequences] == [[1, 2, 3, 4], [5, 6]]


@pytest.mark.parametrize(
    "held",
    [unflushed(4, 5), unflushed(0, index=1), unflushed(3, 4, 5, 6, 7, 8, 9), unflushed(3, 4, logprobs=True)],
    ids=str,
)
def test_what_does_not_fit_the_request_is_not_taken_in(held: scheduler_v1.UnflushedTokens) -> None:
    log = log_of([1, 2, 3])
    with pytest.raises(Diverged):
        merge(log, [held], [0])
    assert log.sequences[0].token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("held", "end"),
    [(unflushed(3, 99), scheduler_v1.SequenceEnd(stop_token_id=99)), (unflushed(3, 4, 5, 6, 7, 8), BY_LENGTH)],
)
def test_tokens_tell_of_the_end(held: scheduler_v1.UnflushedTokens, end: scheduler_v1.SequenceEnd) -> None:
    log = log_of([1, 2, 3])
    merge(log, [held], [0])
    assert log.sequences[0].end == end
    assert is_over(log)


@pytest.mark.parametrize("held", [unflushed(2, is_truncated=True), unflushed(1, 2, is_truncated=True)], ids=str)
def test_a_stop_string_that_the_gateway_found_cuts_the_log(held: scheduler_v1.UnflushedTokens) -> None:
    log = log_of([1, 2, 3])
    log.sequences[0].end = BY_LENGTH
    log.sequences[0].is_end_durable = True
    assert merge(log, [held], [3]) == [LogChange(index=0, offset=2, is_truncated=True)]
    assert (log.sequences[0].token_ids, log.sequences[0].end) == ([1, 2], BY_STRING)
    assert not log.sequences[0].is_end_durable
    assert merge(log, [held], [3]) == []


def test_a_stop_string_beyond_the_log_ends_it() -> None:
    log = log_of([1, 2, 3])
    assert merge(log, [unflushed(3, 4, is_truncated=True)], [0]) == [LogChange(index=0, offset=3, is_truncated=False)]
    assert (log.sequences[0].token_ids, log.sequences[0].end) == ([1, 2, 3, 4], BY_STRING)


def test_a_cut_that_another_gateway_found_stands_against_tokens_beyond_it() -> None:
    log = log_of([1, 2, 3])
    assert truncate(log, 0, 2)
    assert merge(log, [unflushed(1, 2, 3, 4)], [2]) == []
    assert log.sequences[0].token_ids == [1, 2]


def test_log_probabilities_go_with_their_tokens() -> None:
    log = log_of([1, 2, 3], logprobs=True)
    merge(log, [unflushed(2, 7, 8, logprobs=True)], [0])
    assert log.sequences[0].token_ids == [1, 2, 7, 8]
    assert [-int(one.logprob) for one in log.sequences[0].logprobs] == [1, 2, 7, 8]


def test_a_cut_is_done_once_and_never_beyond_what_is_there() -> None:
    log = log_of([1, 2, 3])
    assert not truncate(log, 0, 4)
    assert not truncate(log, 1, 0)
    assert truncate(log, 0, 3)
    assert not truncate(log, 0, 3)
    assert truncate(log, 0, 1)
    assert (log.sequences[0].token_ids, log.sequences[0].end) == ([1], BY_STRING)


def test_a_search_starts_from_its_prompt() -> None:
    log = RequestLog(scheduler_v1.Submit(n=2, max_tokens=8, beam_search=scheduler_v1.BeamSearch(width=2)), 1.0)
    complete(log)
    assert merge(log, [unflushed(0, 1, 2)], []) == []
    assert log.sequences == []
    assert not is_over(log)


def test_a_log_from_the_store_gets_its_places_and_the_ends_that_its_tokens_tell_of() -> None:
    log = log_of([1, 2, 3, 4, 5, 6, 7, 8])
    log.submit.n = 3
    complete(log)
    assert [sequence.end for sequence in log.sequences] == [BY_LENGTH, None, None]
    assert not is_over(log)
