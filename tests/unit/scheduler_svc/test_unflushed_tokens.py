"""Merging a gateway's unflushed tokens with the log: which of them are kept, and when the request fails."""

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
        SequenceLog(
            list(tokens), [token_logprobs(token) for token in tokens] if logprobs else [], num_durable=num_durable
        )
        for tokens in token_ids
    ]
    return log


def token_logprobs(token: int) -> worker_v1.TokenLogprobs:
    return worker_v1.TokenLogprobs(logprob=-token)


def unflushed(
    offset: int, *token_ids: int, index: int = 0, is_truncated: bool = False, logprobs: bool = False
) -> scheduler_v1.UnflushedTokens:
    given = [token_logprobs(token) for token in token_ids] if logprobs else []
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
def test_tokens_beyond_the_log_are_merged(held: scheduler_v1.UnflushedTokens) -> None:
    log = log_of([1, 2, 3], num_durable=2)
    assert merge(log, [held], [3]) == [LogChange(index=0, offset=3, is_truncated=False)]
    assert log.sequences[0].token_ids == [1, 2, 3, 4, 5]
    assert log.sequences[0].num_durable == 2


def test_tokens_that_differ_replace_the_logs() -> None:
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
def test_ends_follow_from_the_tokens(held: scheduler_v1.UnflushedTokens, end: scheduler_v1.SequenceEnd) -> None:
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


def prompt_log(*token_ids: int, num_given: int) -> RequestLog:
    """The four log-probabilities of a prompt of five tokens."""
    log = log_of([*token_ids])
    log.submit.prompt_token_ids.extend(range(5))
    log.submit.result.prompt_logprobs.SetInParent()
    log.prompt_logprobs = [token_logprobs(place) for place in range(1, num_given + 1)]
    return log


def held_with_prompt(num_given: int, *token_ids: int) -> scheduler_v1.UnflushedTokens:
    held = unflushed(0, *token_ids)
    held.prompt_logprobs.extend(token_logprobs(place) for place in range(1, num_given + 1))
    return held


@pytest.mark.parametrize("token_ids", [(), (7, 8)])
@pytest.mark.parametrize("num_known", [0, 2, 4])
def test_log_probabilities_of_the_prompt_that_the_log_lacks_are_taken_in(num_known: int, token_ids: list[int]) -> None:
    log = prompt_log(num_given=num_known)
    merge(log, [held_with_prompt(4, *token_ids)], [0])
    assert [-int(one.logprob) for one in log.prompt_logprobs] == [1, 2, 3, 4]
    assert log.sequences[0].token_ids == [*token_ids]


@pytest.mark.parametrize("held", [held_with_prompt(5), held_with_prompt(3, 7), unflushed(0, 7)], ids=str)
def test_tokens_without_all_log_probabilities_of_the_prompt_are_not_taken_in(
    held: scheduler_v1.UnflushedTokens,
) -> None:
    log = prompt_log(num_given=2)
    with pytest.raises(Diverged):
        merge(log, [held], [0])
    assert (len(log.prompt_logprobs), log.sequences[0].token_ids) == (2, [])


def test_tokens_go_on_where_the_log_has_the_prompt() -> None:
    log = prompt_log(7, num_given=4)
    assert merge(log, [unflushed(1, 8)], [0]) == [LogChange(index=0, offset=1, is_truncated=False)]
    assert log.sequences[0].token_ids == [7, 8]


def test_nothing_is_cut_from_a_value_nor_added_to_it() -> None:
    submit = scheduler_v1.Submit(n=1, result=worker_v1.ResultKind(embedding=worker_v1.EmbeddingResult()))
    log = RequestLog(submit, accepted_at=1.0)
    complete(log)
    assert not is_over(log)
    assert not truncate(log, 0, 0)
    assert merge(log, [unflushed(0, 7), unflushed(0, is_truncated=True)], [0]) == []
    log.sequences[0].end = scheduler_v1.SequenceEnd(value=worker_v1.PromptValue(numbers=[1.0]))
    assert is_over(log)


def test_a_log_from_the_store_is_completed_with_sequences_and_ends() -> None:
    log = log_of([1, 2, 3, 4, 5, 6, 7, 8])
    log.submit.n = 3
    complete(log)
    assert [sequence.end for sequence in log.sequences] == [BY_LENGTH, None, None]
    assert not is_over(log)
