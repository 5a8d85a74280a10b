"""Checks what a worker answers before the core sees it: a message that is not the answer due is refused whole."""

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.plan import SampledSequence, StepOutcome, StepPlan
from scheduler_svc.core.replica import Replica
from scheduler_svc.wire import outcome_from_proto


class InvalidPart(StrEnum):
    """Why an answer is refused."""

    EPOCH = "epoch"  # of another term
    GENERATION = "generation"  # of another stream
    STEP = "step"  # not the step that is due: an old one, one told twice, one that was never sent
    MALFORMED = "malformed"  # its parts do not fit each other
    SEQUENCES = "sequences"  # of others than those that were sent
    TOKENS = "tokens"  # more or less than one where one is due, or one beyond the vocabulary
    LOGPROBS = "logprobs"  # missing where asked for, or no numbers
    SWAPS = "swaps"  # that are not in progress


class InvalidResponse(Exception):  # noqa: N818
    """An answer that is not taken in. The text is for the operator; it holds no tokens."""

    def __init__(self, part: InvalidPart, text: str) -> None:
        super().__init__(text)
        self.part = part


@dataclass(frozen=True, slots=True)
class _ExpectedResult:
    """What the answer to a step must be: of these sequences, with so many tokens each.

    With `most`, for a worker that speculates, any number of tokens from 0 to `most` is valid instead.
    `num_top_logprobs` is by place, of those that ask for log-probabilities: how many of the likeliest tokens.
    """

    sequence_ids: list[int]
    num_tokens: list[int]
    num_top_logprobs: dict[int, int]
    most: list[int] | None


class ResponseValidator:
    """The answers that are due on the step stream that `opening` opened, from a worker with so large a vocabulary."""

    def __init__(self, opening: worker_v1.StepRequest, vocab_size: int, max_new_tokens: int = 1) -> None:
        self._opening, self._vocab_size, self._speculates = opening, vocab_size, max_new_tokens > 1
        # Of the sequences that the worker knows and that ask for log-probabilities: how many of the likeliest tokens.
        self._logprobs_by_id: dict[int, int] = {}
        self._expected: deque[_ExpectedResult] = deque()  # of each step in flight

    def expect(self, plan: StepPlan) -> None:
        """A step is sent: its answer is due behind those of the steps before it.

        What can be known of it is made here, while the worker computes, and not when the answer is there.
        """
        for sequence_id in plan.finished_ids:
            self._logprobs_by_id.pop(sequence_id, None)
        for new in plan.new_sequences:
            sampling = cast(worker_v1.SamplingParams, new.sequence.request.sampling)
            if sampling.HasField("logprobs"):
                self._logprobs_by_id[new.sequence.id] = sampling.logprobs
        ids = [part.sequence.id for part in plan.scheduled]
        num_tokens = [int(part.samples) for part in plan.scheduled]
        num_top_logprobs = {}
        if self._logprobs_by_id:
            drawing = [(schedule_index, one) for schedule_index, one in enumerate(ids) if num_tokens[schedule_index]]
            num_top_logprobs = {
                schedule_index: self._logprobs_by_id[one]
                for schedule_index, one in drawing
                if one in self._logprobs_by_id
            }
        most = [part.samples + part.max_extra_tokens for part in plan.scheduled] if self._speculates else None
        self._expected.append(_ExpectedResult(ids, num_tokens, num_top_logprobs, most))

    def outcome_of(self, response: worker_v1.StepResponse, replica: Replica) -> StepOutcome:
        """What came of the oldest step in flight. Raises InvalidResponse."""
        plan, expected, result = self._plan_of(response, replica), self._expected.popleft(), response.result
        if result.sequence_ids[:] != expected.sequence_ids:
            text = f"step {plan.step_id} is answered for other sequences than it has"
            raise InvalidResponse(InvalidPart.SEQUENCES, text)
        try:
            outcome = outcome_from_proto(result)
        except ValueError as error:
            raise InvalidResponse(InvalidPart.MALFORMED, f"the answer to step {plan.step_id} has {error}") from None
        if max(result.token_ids[:], default=0) >= self._vocab_size:
            text = f"step {plan.step_id} drew a token beyond the {self._vocab_size} there are"
            raise InvalidResponse(InvalidPart.TOKENS, text)
        _check_counts(expected, result)
        for schedule_index, num_top_logprobs in expected.num_top_logprobs.items():
            if outcome.results[schedule_index].failure is None:
                self._check_logprobs(
                    expected.sequence_ids[schedule_index], outcome.results[schedule_index], num_top_logprobs
                )
        swaps = [(done.step_id, done.direction) for done in outcome.swaps]
        if len(set(swaps)) < len(swaps) or not all(replica.swaps.is_in_progress(*one) for one in swaps):
            text = f"step {plan.step_id} is answered with copies that are not under way"
            raise InvalidResponse(InvalidPart.SWAPS, text)
        return outcome

    def _plan_of(self, response: worker_v1.StepResponse, replica: Replica) -> StepPlan:
        """The step that a response is due for."""
        epoch, generation = self._opening.epoch, self._opening.generation
        if response.epoch != epoch:
            text = f"an answer of epoch {response.epoch} on a stream of epoch {epoch}"
            raise InvalidResponse(InvalidPart.EPOCH, text)
        if response.generation != generation:
            text = f"an answer of generation {response.generation} on a stream of generation {generation}"
            raise InvalidResponse(InvalidPart.GENERATION, text)
        plan = replica.in_flight[0] if replica.in_flight else None
        if plan is None or response.step_id != plan.step_id:
            text = f"an answer to step {response.step_id}, and {'none' if plan is None else plan.step_id} is due"
            raise InvalidResponse(InvalidPart.STEP, text)
        if not response.HasField("result"):
            raise InvalidResponse(InvalidPart.MALFORMED, f"the answer to step {plan.step_id} has no result")
        return plan

    def _check_logprobs(self, sequence_id: int, row: SampledSequence, num_top_logprobs: int) -> None:
        logprobs = cast("Seq[worker_v1.TokenLogprobs]", row.logprobs)
        num_top = min(num_top_logprobs, self._vocab_size)
        if len(logprobs) != len(row.token_ids) or not all(
            _is_valid(one, num_top, self._vocab_size) for one in logprobs
        ):
            text = f"sequence {sequence_id} is answered without the log-probabilities that it asks for"
            raise InvalidResponse(InvalidPart.LOGPROBS, text)


def _check_counts(expected: _ExpectedResult, result: worker_v1.StepResult) -> None:
    """One token for each sequence, or none where it does not sample or failed. With speculation, 0 to `most`."""
    counts, expected_counts = result.num_tokens[:], expected.num_tokens
    if counts == expected_counts and not result.failures:
        return
    least, most = expected_counts.copy(), (expected.most or expected_counts).copy()
    if expected.most is not None:
        least = [0] * len(most)
    for failure in result.failures:
        least[failure.schedule_index] = most[failure.schedule_index] = 0
    for sequence_id, num_tokens, fewest, highest in zip(expected.sequence_ids, counts, least, most, strict=True):
        if not fewest <= num_tokens <= highest:
            due = f"{highest}" if fewest == highest else f"{fewest} to {highest}"
            text = f"sequence {sequence_id} is answered with {num_tokens} tokens, and {due} are due"
            raise InvalidResponse(InvalidPart.TOKENS, text)


def _is_valid(logprobs: worker_v1.TokenLogprobs, num_top_logprobs: int, vocab_size: int) -> bool:
    total = logprobs.logprob
    for entry in logprobs.top:  # in one pass: each look at a message costs
        if entry.token_id >= vocab_size:
            return False
        total += entry.logprob
    return len(logprobs.top) == num_top_logprobs and math.isfinite(total)
