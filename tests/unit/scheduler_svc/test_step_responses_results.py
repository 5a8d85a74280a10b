"""Values and log-probabilities of prompts are accepted only if exactly the due ones arrive and all are finite."""

import math
from typing import Any

import pytest

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.results import PROMPT_LOGPROBS, TOKENS, ResultForm, ResultKind
from scheduler_svc.core.step import FailureCause, NewSequence, ScheduledSequence, StepOutcome, StepPlan, ValueResult
from scheduler_svc.step_responses import InvalidPart, InvalidResponse, ResponseValidator

VOCAB = 100
PROMPT = [1, 2, 3, 4, 5]
EMBEDDING = ResultKind("embedding", ResultForm.VALUE)


def sequence(sequence_id: int, kind: ResultKind, **asked: Any) -> Sequence:
    # A request for a value may ask for log-probabilities of tokens, of which it has none.
    sampling = worker_v1.SamplingParams(logprobs=1) if kind is EMBEDDING else worker_v1.SamplingParams()
    params = worker_v1.ResultKind(**asked)
    request = Request("k", PROMPT, 1, 1, sampling=sampling, result=kind, result_params=params)
    return Sequence(sequence_id, request, 0, 0, PROMPT)


class Stream:
    """A worker's step stream, and three sequences: for tokens, for a value, and for a prompt's log-probabilities."""

    def __init__(self, max_sampled_tokens: int = 1) -> None:
        self.replica = Replica(ReplicaShape(b"", 16, 8, 64, 64, 8, max_sampled_tokens=max_sampled_tokens))
        self.validator = ResponseValidator(worker_v1.StepRequest(epoch=1, generation=1), VOCAB, max_sampled_tokens)
        self.plain = sequence(7, TOKENS)
        self.embedding = sequence(8, EMBEDDING, embedding=worker_v1.EmbeddingResult())
        asked = worker_v1.PromptLogprobsResult(num_top_logprobs=1)
        self.prompted = sequence(9, PROMPT_LOGPROBS, prompt_logprobs=asked)

    def plan(
        self, *parts: tuple[Sequence, int, int], is_new: bool = True, finished_ids: list[int] | None = None
    ) -> None:
        """A step in which sequences compute tokens `start` to `end` - 1."""
        self.replica.num_steps += 1
        new = [NewSequence(one, PROMPT, one.request.result is PROMPT_LOGPROBS) for one, _, _ in parts] if is_new else []
        scheduled = [ScheduledSequence(s, start, end - start, [], start, end >= len(PROMPT)) for s, start, end in parts]
        plan = StepPlan(self.replica.num_steps, finished_ids or [], new, scheduled)
        self.replica.steps_in_flight.append(plan)
        self.validator.expect(plan)

    def answer(self, **fields: Any) -> StepOutcome:
        """Take in an answer to the oldest step."""
        plan = self.replica.steps_in_flight[0]
        result = worker_v1.StepResult(**({"sequence_ids": [part.sequence.id for part in plan.scheduled]} | fields))
        response = worker_v1.StepResponse(epoch=1, generation=1, step_id=plan.step_id, result=result)
        outcome = self.validator.outcome_of(response, self.replica)
        self.replica.finish_step()
        return outcome


def value(*numbers: float, place: int = 0) -> worker_v1.SequenceValue:
    return worker_v1.SequenceValue(schedule_index=place, value=worker_v1.PromptValue(numbers=numbers))


def prompt_logprobs(*values: float, place: int = 0, top: int | None = 1) -> worker_v1.SequenceLogprobs:
    top_tokens = [] if top is None else [worker_v1.Logprob(token_id=top, logprob=-1)]
    tokens = [worker_v1.TokenLogprobs(logprob=one, top=top_tokens) for one in values]
    return worker_v1.SequenceLogprobs(schedule_index=place, tokens=tokens)


def test_each_result_goes_to_its_sequence() -> None:
    stream = Stream()
    stream.plan((stream.plain, 0, 5), (stream.embedding, 0, 5), (stream.prompted, 0, 5))
    outcome = stream.answer(
        num_tokens=[1, 0, 1],
        token_ids=[3, 4],
        values=[value(0.5, -2, place=1)],
        prompt_logprobs=[prompt_logprobs(-1, -2, -3, -4, place=2)],
    )
    plain, embedding, prompted = outcome.results
    assert isinstance(embedding, ValueResult)
    assert list(embedding.value.numbers) == [0.5, -2]  # type: ignore[attr-defined]
    assert [list(one.token_ids) for one in (plain, embedding, prompted)] == [[3], [], [4]]
    assert {place: len(found) for place, found in outcome.prompt_logprobs.items()} == {2: 4}


def test_value_is_due_once_the_prompt_is_computed() -> None:
    stream = Stream()
    stream.plan((stream.embedding, 0, 3))
    stream.plan((stream.embedding, 3, 5), is_new=False)
    assert not isinstance(stream.answer(num_tokens=[0]).results[0], ValueResult)
    assert isinstance(stream.answer(num_tokens=[0], values=[value(1)]).results[0], ValueResult)


def test_no_value_is_due_of_another_sequence_with_the_id_of_one_that_ended_with_its_value() -> None:
    stream = Stream()
    stream.plan((stream.embedding, 0, 5))
    stream.answer(num_tokens=[0], values=[value(1)])
    stream.plan((sequence(stream.embedding.id, TOKENS), 0, 5))
    assert list(stream.answer(num_tokens=[1], token_ids=[3]).results[0].token_ids) == [3]


@pytest.mark.parametrize(
    ("start", "end", "count"), [(0, 3, 3), (3, 4, 1), (0, 5, 4), (3, 5, 1), (4, 5, 0), (2, 7, 2), (5, 6, 0)]
)
def test_log_probabilities_are_due_of_the_tokens_of_the_prompt_behind_those_computed(
    start: int, end: int, count: int
) -> None:
    """Also if a part extends beyond the prompt, like one that is recomputed."""
    stream = Stream()
    stream.plan((stream.prompted, start, end))
    tokens = {"num_tokens": [1], "token_ids": [3]} if end >= len(PROMPT) else {"num_tokens": [0]}
    logprobs = [prompt_logprobs(*[-1.0] * count)] if count else []
    assert sum(map(len, stream.answer(**tokens, prompt_logprobs=logprobs).prompt_logprobs.values())) == count


def test_nothing_is_due_of_a_sequence_that_failed() -> None:
    stream = Stream()
    stream.plan((stream.embedding, 0, 5), (stream.prompted, 0, 5))
    reasons = (worker_v1.SEQUENCE_FAILURE_REASON_UNSPECIFIED, worker_v1.SEQUENCE_FAILURE_REASON_GRAMMAR_TOO_COMPLEX)
    failures = [
        worker_v1.SequenceFailure(schedule_index=place, message="bad", reason=reason)
        for place, reason in enumerate(reasons)
    ]
    outcome = stream.answer(num_tokens=[0, 0], failures=failures)
    assert [one.failure for one in outcome.results] == ["bad", "bad"]
    assert [one.failure_cause for one in outcome.results] == [
        FailureCause.INTERNAL,
        FailureCause.GRAMMAR_TOO_COMPLEX,
    ]
    assert not outcome.prompt_logprobs


def test_nothing_is_due_once_a_sequence_came_back_without_asking() -> None:
    stream = Stream()
    stream.plan((stream.prompted, 0, 3))
    stream.answer(num_tokens=[0], prompt_logprobs=[prompt_logprobs(-1, -2, -3)])
    stream.plan(finished_ids=[stream.prompted.id])
    stream.answer()
    plain = sequence(stream.prompted.id, TOKENS)
    stream.plan((plain, 0, 5))
    assert not stream.answer(num_tokens=[1], token_ids=[3]).prompt_logprobs


def test_a_worker_that_speculates_returns_no_token_beside_a_value() -> None:
    stream = Stream(max_sampled_tokens=3)
    stream.plan((stream.embedding, 0, 5))
    with pytest.raises(InvalidResponse) as refusal:
        stream.answer(num_tokens=[1], token_ids=[3], values=[value(1)])
    assert refusal.value.part is InvalidPart.TOKENS


BAD_VALUES: dict[str, list[worker_v1.SequenceValue]] = {
    "none": [],
    "two": [value(1), value(1)],
    "of another sequence": [value(1, place=1)],
    "of no sequence": [value(1), value(1, place=2)],
    "without numbers": [value()],
    "infinite": [value(1, math.inf)],
    "not a number": [value(math.nan)],
}


@pytest.mark.parametrize("values", BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_a_value_that_is_not_due_or_none_is_refused(values: list[worker_v1.SequenceValue]) -> None:
    stream = Stream()
    stream.plan((stream.embedding, 0, 5), (stream.plain, 0, 5))
    with pytest.raises(InvalidResponse) as refusal:
        stream.answer(num_tokens=[0, 1], token_ids=[3], values=values)
    is_beyond = any(one.schedule_index > 1 for one in values)
    assert refusal.value.part is (InvalidPart.MALFORMED if is_beyond else InvalidPart.RESULTS)


def test_a_value_of_a_sequence_that_failed_is_refused() -> None:
    stream = Stream()
    stream.plan((stream.embedding, 0, 5))
    failure = worker_v1.SequenceFailure(schedule_index=0, message="bad")
    with pytest.raises(InvalidResponse):
        stream.answer(num_tokens=[0], failures=[failure], values=[value(1)])


BAD_LOGPROBS: dict[str, list[worker_v1.SequenceLogprobs]] = {
    "none": [],
    "twice": [prompt_logprobs(-1, -2, -3), prompt_logprobs(-1, -2, -3)],
    "of another sequence": [prompt_logprobs(-1, -2, -3, place=1)],
    "of no sequence": [prompt_logprobs(-1, -2, -3), prompt_logprobs(-1, place=2)],
    "too few": [prompt_logprobs(-1, -2)],
    "too many": [prompt_logprobs(-1, -2, -3, -4)],
    "no numbers": [prompt_logprobs(-1, -2, -math.inf)],
    "no top tokens": [prompt_logprobs(-1, -2, -3, top=None)],
    "top token beyond the vocabulary": [prompt_logprobs(-1, -2, -3, top=VOCAB)],
}


@pytest.mark.parametrize("logprobs", BAD_LOGPROBS.values(), ids=BAD_LOGPROBS.keys())
def test_log_probabilities_that_are_not_due_or_none_are_refused(logprobs: list[worker_v1.SequenceLogprobs]) -> None:
    stream = Stream()
    stream.plan((stream.prompted, 0, 3), (stream.plain, 0, 5))
    with pytest.raises(InvalidResponse) as refusal:
        stream.answer(num_tokens=[0, 1], token_ids=[3], prompt_logprobs=logprobs)
    assert refusal.value.part is InvalidPart.RESULTS


@pytest.mark.parametrize("requested", [[], [-1.0], [-1.0, math.nan], [-1.0, -2.0, -3.0]])
def test_log_probabilities_of_named_tokens_are_due(requested: list[float]) -> None:
    params = worker_v1.SamplingParams(logprobs=0, logprob_token_ids=[3, 4])
    for values, is_valid in ((requested, False), ([-1.0, -math.inf], True)):
        stream = Stream()
        asking = Sequence(7, Request("k", PROMPT, 1, 1, sampling=params), 0, 0, PROMPT)
        stream.plan((asking, 0, 5))
        logprobs = worker_v1.SequenceLogprobs(tokens=[worker_v1.TokenLogprobs(logprob=-1, requested=values)])
        if is_valid:
            assert stream.answer(num_tokens=[1], token_ids=[3], logprobs=[logprobs]).results[0].token_ids == (3,)
            continue
        with pytest.raises(InvalidResponse) as refused:
            stream.answer(num_tokens=[1], token_ids=[3], logprobs=[logprobs])
        assert refused.value.part is InvalidPart.LOGPROBS
