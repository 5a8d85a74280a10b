"""Validates a worker's answers: an answer to a step becomes the core's outcome, or is rejected
whole."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import accumulate
from operator import add
from typing import NamedTuple, cast

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.step import (
    Direction,
    FailureCause,
    NewSequence,
    SampledSequence,
    ScheduledSequence,
    StepOutcome,
    StepPlan,
    SwapDone,
    ValueResult,
)
from scheduler_svc.result_kinds import VALUE_CHECKS
from scheduler_svc.step_wire import pressure_from_proto

_DIRECTIONS = {worker_v1.DIRECTION_OUT: Direction.OUT, worker_v1.DIRECTION_IN: Direction.IN}

_FAILURE_CAUSES = {
    worker_v1.SEQUENCE_FAILURE_REASON_GRAMMAR_TOO_COMPLEX: FailureCause.GRAMMAR_TOO_COMPLEX,
    worker_v1.SEQUENCE_FAILURE_REASON_OUT_OF_MEMORY: FailureCause.OUT_OF_MEMORY,
}


class InvalidPart(StrEnum):
    """The part of an answer for which it is rejected."""

    EPOCH = "epoch"  # of another term
    GENERATION = "generation"  # of another stream
    STEP = "step"  # not the step that is due: an old one, one that was answered, or one that was never sent
    MALFORMED = "malformed"  # its parts do not fit each other
    SEQUENCES = "sequences"  # others than those of the step
    TOKENS = "tokens"  # more or fewer than are due, or one beyond the vocabulary
    LOGPROBS = "logprobs"  # missing where requested, or not numbers
    RESULTS = "results"  # values or log-probabilities of prompts: others than are due, or not numbers
    SWAPS = "swaps"  # that are not in progress


class InvalidResponse(Exception):  # noqa: N818
    """An answer that is rejected. The text is for the operator; it holds no tokens."""

    def __init__(self, part: InvalidPart, text: str) -> None:
        super().__init__(text)
        self.part = part


@dataclass(frozen=True, slots=True)
class _Requested:
    """The results of a sequence besides tokens. One with a `value` has no others.

    `num_top_logprobs`, and `num_other_logprobs` of tokens that it names, are per token; `prompt_length` is 0 unless
    log-probabilities of the prompt are requested.
    """

    num_top_logprobs: int | None
    value: worker_v1.ResultKind | None
    prompt_length: int
    num_top_prompt_logprobs: int
    num_other_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class _ExpectedResult:
    """The valid answer to a step: these sequences, with `num_tokens` each.

    With `most`, for a worker that speculates, any number of tokens from 0 to `most` is valid instead. A sequence with a
    grammar may have none. By index in the step: which these are; how many log-probabilities per token, of top tokens
    and of those that the request names; values; and log-probabilities of the prompt, as their count and the number of
    top ones.
    """

    sequence_ids: list[int]
    num_tokens: list[int]
    most: list[int] | None
    constrained: list[int]
    num_logprobs: dict[int, tuple[int, int]] = field(default_factory=dict)
    values: dict[int, worker_v1.ResultKind] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, int]] = field(default_factory=dict)


class SequenceResult(NamedTuple):
    """A worker's result for one scheduled sequence."""

    token_ids: Seq[int]
    logprobs: Seq[object]
    failure: str | None
    failure_cause: FailureCause


class ResponseValidator:
    """The answers that are due on the step stream that `opening` opened."""

    def __init__(self, opening: worker_v1.StepRequest, vocab_size: int, max_sampled_tokens: int = 1) -> None:
        self._opening, self._vocab_size, self._speculates = opening, vocab_size, max_sampled_tokens > 1
        self._requests: dict[int, _Requested] = {}  # by id, of the worker's sequences that ask for more than tokens
        self._constrained: set[int] = set()  # the ids of those with a grammar
        self._expected: deque[_ExpectedResult] = deque()  # one for each step in flight

    def expect(self, plan: StepPlan) -> None:
        """A step was sent: its answer is due after those of the steps before it.

        The expected answer is computed here, while the worker computes, and not when the answer has arrived.
        """
        if self._requests:
            for sequence_id in plan.finished_ids:
                self._requests.pop(sequence_id, None)
        if self._constrained:
            self._constrained.difference_update(plan.finished_ids)
        for new in plan.new_sequences:
            if cast(worker_v1.SamplingParams, new.sequence.request.sampling).grammar:
                self._constrained.add(new.sequence.id)
            if (request := _requested_of(new)) is not None:
                self._requests[new.sequence.id] = request
        ids = [part.sequence.id for part in plan.scheduled]
        num_tokens = [int(part.samples) for part in plan.scheduled]
        constrained = [place for place, number in enumerate(ids) if number in self._constrained]
        expected = _ExpectedResult(ids, num_tokens, None, constrained)
        if self._requests:
            self._expect_requested(plan, expected)
        if self._speculates:
            most = list(map(add, num_tokens, [part.max_extra_tokens for part in plan.scheduled]))
            expected = _ExpectedResult(
                ids, num_tokens, most, constrained, expected.num_logprobs, expected.values, expected.prompt_logprobs
            )
        self._expected.append(expected)

    def _expect_requested(self, plan: StepPlan, expected: _ExpectedResult) -> None:
        for schedule_index, part in enumerate(plan.scheduled):
            request = self._requests.get(part.sequence.id)
            if request is None:
                continue
            if request.value is not None:
                if part.samples:
                    expected.values[schedule_index] = request.value
                    expected.num_tokens[schedule_index] = 0
                    del self._requests[part.sequence.id]  # its value ends it
                continue
            if part.samples and request.num_top_logprobs is not None:
                num_top = min(request.num_top_logprobs, self._vocab_size)
                expected.num_logprobs[schedule_index] = num_top, request.num_other_logprobs
            if count := _num_prompt_logprobs(part, request.prompt_length):
                num_top = min(request.num_top_prompt_logprobs, self._vocab_size)
                expected.prompt_logprobs[schedule_index] = count, num_top

    def outcome_of(self, response: worker_v1.StepResponse, replica: Replica) -> StepOutcome:
        """The outcome of the oldest step in flight. Raises InvalidResponse."""
        plan, expected, result = self._plan_of(response, replica), self._expected.popleft(), response.result
        if result.sequence_ids[:] != expected.sequence_ids:
            text = f"step {plan.step_id} is answered for other sequences than it has"
            raise InvalidResponse(InvalidPart.SEQUENCES, text)
        try:
            outcome = _outcome(result)
        except ValueError as error:
            raise InvalidResponse(InvalidPart.MALFORMED, f"the answer to step {plan.step_id} has {error}") from None
        if max(result.token_ids[:], default=0) >= self._vocab_size:
            text = f"step {plan.step_id} is answered with a token beyond the vocabulary of {self._vocab_size}"
            raise InvalidResponse(InvalidPart.TOKENS, text)
        _check_counts(expected, result)
        if expected.values or expected.prompt_logprobs or result.values or result.prompt_logprobs:
            self._check_other_results(expected, result)
        self._check_logprobs(expected, outcome)
        swaps = [(done.step_id, done.direction) for done in outcome.swaps]
        if len(set(swaps)) < len(swaps) or not all(replica.kv.swaps.is_in_progress(*one) for one in swaps):
            text = f"step {plan.step_id} is answered with copies that are not in progress"
            raise InvalidResponse(InvalidPart.SWAPS, text)
        return outcome

    def _plan_of(self, response: worker_v1.StepResponse, replica: Replica) -> StepPlan:
        """The step that an answer is due for."""
        epoch, generation = self._opening.epoch, self._opening.generation
        if response.epoch != epoch:
            text = f"an answer of epoch {response.epoch} on a stream of epoch {epoch}"
            raise InvalidResponse(InvalidPart.EPOCH, text)
        if response.generation != generation:
            text = f"an answer of generation {response.generation} on a stream of generation {generation}"
            raise InvalidResponse(InvalidPart.GENERATION, text)
        plan = replica.steps_in_flight[0] if replica.steps_in_flight else None
        if plan is None or response.step_id != plan.step_id:
            text = f"an answer to step {response.step_id}, and {'none' if plan is None else plan.step_id} is due"
            raise InvalidResponse(InvalidPart.STEP, text)
        if not response.HasField("result"):
            raise InvalidResponse(InvalidPart.MALFORMED, f"the answer to step {plan.step_id} has no result")
        return plan

    def _check_logprobs(self, expected: _ExpectedResult, outcome: StepOutcome) -> None:
        for schedule_index, (num_top, num_others) in expected.num_logprobs.items():
            result = outcome.results[schedule_index]
            logprobs = cast("Seq[worker_v1.TokenLogprobs]", result.logprobs)
            if result.failure is not None:
                continue
            are_valid = all(self._is_valid(one, num_top, num_others) for one in logprobs)
            if len(logprobs) != len(result.token_ids) or not are_valid:
                sequence_id = expected.sequence_ids[schedule_index]
                text = f"sequence {sequence_id} is answered without its log-probabilities"
                raise InvalidResponse(InvalidPart.LOGPROBS, text)

    def _check_other_results(self, expected: _ExpectedResult, result: worker_v1.StepResult) -> None:
        """Exactly the values and log-probabilities of prompts that are due; none of sequences that failed."""
        failed = {failure.schedule_index for failure in result.failures}
        _check_indices("values", expected.values, failed, [value.schedule_index for value in result.values])
        for one in result.values:
            requested = expected.values[one.schedule_index]
            name = requested.WhichOneof("kind")
            assert name is not None, "a value has a kind"
            if (wrong := VALUE_CHECKS[name](requested, one.value)) is not None:
                sequence_id = expected.sequence_ids[one.schedule_index]
                raise InvalidResponse(InvalidPart.RESULTS, f"the {name} of sequence {sequence_id} has {wrong}")
        indices = [part.schedule_index for part in result.prompt_logprobs]
        _check_indices("log-probabilities of prompts", expected.prompt_logprobs, failed, indices)
        for part in result.prompt_logprobs:
            count, num_top = expected.prompt_logprobs[part.schedule_index]
            sequence_id = expected.sequence_ids[part.schedule_index]
            if len(part.tokens) != count:
                text = f"{len(part.tokens)} log-probabilities of its prompt, and {count} are due"
                raise InvalidResponse(InvalidPart.RESULTS, f"sequence {sequence_id} has {text}")
            if not all(self._is_valid(one, num_top) for one in part.tokens):
                text = f"sequence {sequence_id} has invalid log-probabilities of its prompt"
                raise InvalidResponse(InvalidPart.RESULTS, text)

    def _is_valid(self, logprobs: worker_v1.TokenLogprobs, num_top_logprobs: int, num_others: int = 0) -> bool:
        """Whether these are numbers, with `num_top_logprobs` top tokens, all of them in the vocabulary, and
        `num_others` other ones, which may be minus infinity.
        """
        total = logprobs.logprob
        for entry in logprobs.top:  # in one pass: each access to a message costs time
            if entry.token_id >= self._vocab_size:
                return False
            total += entry.logprob
        others = logprobs.requested
        if len(others) != num_others or any(map(math.isnan, others)):
            return False
        return len(logprobs.top) == num_top_logprobs and math.isfinite(total)


def _requested_of(new: NewSequence) -> _Requested | None:
    request = new.sequence.request
    sampling = cast(worker_v1.SamplingParams, request.sampling)
    result = cast(worker_v1.ResultKind, request.result_params)
    if request.returns_value:
        return _Requested(None, result, 0, 0)
    num_top = sampling.logprobs if sampling.HasField("logprobs") else None
    num_others = 0 if num_top is None else len(sampling.logprob_token_ids)
    if new.needs_prompt_logprobs:
        num_top_of_prompt = result.prompt_logprobs.num_top_logprobs
        return _Requested(num_top, None, len(request.prompt), num_top_of_prompt, num_others)
    return None if num_top is None else _Requested(num_top, None, 0, 0, num_others)


def _num_prompt_logprobs(part: ScheduledSequence, prompt_length: int) -> int:
    """How many tokens of the prompt follow one that this part of a step computes."""
    return max(0, min(part.start + part.num_tokens, prompt_length - 1) - part.start)


def _check_counts(expected: _ExpectedResult, result: worker_v1.StepResult) -> None:
    """One token for each sequence, or none where it does not sample or failed, or has a grammar. With speculation, 0 to
    `most`.
    """
    counts, expected_counts = result.num_tokens[:], expected.num_tokens
    if counts == expected_counts and not result.failures:
        return
    least, most = expected_counts.copy(), (expected.most or expected_counts).copy()
    if expected.most is not None:
        least = [0] * len(most)
    for schedule_index in expected.constrained:
        least[schedule_index] = 0
    for failure in result.failures:
        least[failure.schedule_index] = most[failure.schedule_index] = 0
    for sequence_id, num_tokens, fewest, highest in zip(expected.sequence_ids, counts, least, most, strict=True):
        if not fewest <= num_tokens <= highest:
            due = f"{highest}" if fewest == highest else f"{fewest} to {highest}"
            text = f"sequence {sequence_id} is answered with {num_tokens} tokens, and {due} are due"
            raise InvalidResponse(InvalidPart.TOKENS, text)


def _check_indices(what: str, expected: Mapping[int, object], failed: Iterable[int], indices: list[int]) -> None:
    due = sorted(expected.keys() - set(failed))
    if sorted(indices) != due:
        text = f"{what} are of schedule indices {sorted(indices)[:8]}, and due are {due[:8]}"
        raise InvalidResponse(InvalidPart.RESULTS, text)


def _outcome(result: worker_v1.StepResult) -> StepOutcome:
    """Raises ValueError where the message's parts do not fit each other."""
    swaps = []
    for done in result.swaps:
        if done.direction not in _DIRECTIONS:
            raise ValueError("a swap without a direction")
        failure = done.failure if done.HasField("failure") else None
        swaps.append(SwapDone(done.step_id, _DIRECTIONS[done.direction], done.duration_us / 1e6, failure))
    prompt_logprobs = {part.schedule_index: part.tokens for part in result.prompt_logprobs}
    pressure = pressure_from_proto(result.memory_pressure)
    return StepOutcome(_sequence_results(result), swaps, result.busy_us / 1e6, prompt_logprobs, pressure)


def _sequence_results(result: worker_v1.StepResult) -> list[SampledSequence]:
    counts, tokens = result.num_tokens[:], result.token_ids[:]
    if len(counts) != len(result.sequence_ids) or sum(counts) != len(tokens):
        raise ValueError("columns of different lengths")
    logprobs: list[Seq[object]] = [()] * len(counts)
    failures: list[str | None] = [None] * len(counts)
    causes = [FailureCause.INTERNAL] * len(counts)
    try:
        for part in result.logprobs:
            logprobs[part.schedule_index] = part.tokens
        for failure in result.failures:
            failures[failure.schedule_index] = failure.message
            causes[failure.schedule_index] = _FAILURE_CAUSES.get(failure.reason, FailureCause.INTERNAL)
    except IndexError:
        raise ValueError("a part of a sequence beyond the last one") from None
    rows: Iterable[tuple[int, ...]]
    if counts.count(1) == len(counts):  # decodes, mostly
        rows = zip(tokens, strict=True)
    else:
        rows = (tuple(tokens[end - count : end]) for count, end in zip(counts, accumulate(counts), strict=True))
    # Hundreds in each step: made without a Python call for each.
    make = partial(tuple.__new__, SequenceResult)
    results: list[SampledSequence] = list(map(make, zip(rows, logprobs, failures, causes, strict=True)))
    for one in result.values:
        if one.schedule_index >= len(results):
            raise ValueError("a value of a sequence beyond the last one")
        results[one.schedule_index] = ValueResult(one.value)
    return results
