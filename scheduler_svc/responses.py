"""Checks what a worker answers before the core sees it: a message that is not the answer due is refused whole."""

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.plan import Drawn, StepOutcome, StepPlan
from scheduler_svc.core.replica import Replica
from scheduler_svc.wire import outcome_from_proto


class Refusal(StrEnum):
    """Why an answer is refused."""

    EPOCH = "epoch"  # of another term
    GENERATION = "generation"  # of another stream
    STEP = "step"  # not the step that is due: an old one, one told twice, one that was never sent
    MALFORMED = "malformed"  # its parts do not fit each other
    SEQUENCES = "sequences"  # of others than those that were sent
    TOKENS = "tokens"  # more or less than one where one is due, or one beyond the vocabulary
    LOGPROBS = "logprobs"  # missing where asked for, or no numbers
    TRANSFERS = "transfers"  # of blocks that are not under way


class ResponseRefused(Exception):  # noqa: N818
    """An answer that is not taken in. The text is for the operator; it holds no tokens."""

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class _Due:
    """What the answer to a step must be: of these sequences, with so many tokens each.

    `num_likely` is by place, of those that ask for log-probabilities: how many of the likeliest tokens.
    """

    sequence_ids: list[int]
    num_tokens: list[int]
    num_likely: dict[int, int]


class Answers:
    """The answers that are due on the step stream that `opening` opened, from a worker with so large a vocabulary."""

    def __init__(self, opening: worker_v1.StepRequest, vocab_size: int) -> None:
        self._opening, self._vocab_size = opening, vocab_size
        # Of the sequences that the worker knows and that ask for log-probabilities: how many of the likeliest tokens.
        self._asking: dict[int, int] = {}
        self._due: deque[_Due] = deque()  # of each step in flight

    def expect(self, plan: StepPlan) -> None:
        """A step is sent: its answer is due behind those of the steps before it.

        What can be known of it is made here, while the worker computes, and not when the answer is there.
        """
        for sequence_id in plan.departed_ids:
            self._asking.pop(sequence_id, None)
        for new in plan.introductions:
            sampling = cast(worker_v1.SamplingParams, new.sequence.request.sampling)
            if sampling.HasField("logprobs"):
                self._asking[new.sequence.id] = sampling.logprobs
        ids = [part.sequence.id for part in plan.scheduled]
        num_tokens = [int(part.draws) for part in plan.scheduled]
        num_likely = {}
        if self._asking:
            drawing = [(place, one) for place, one in enumerate(ids) if num_tokens[place]]
            num_likely = {place: self._asking[one] for place, one in drawing if one in self._asking}
        self._due.append(_Due(ids, num_tokens, num_likely))

    def outcome_of(self, response: worker_v1.StepResponse, replica: Replica) -> StepOutcome:
        """What came of the oldest step in flight. Raises ResponseRefused."""
        plan, due, result = self._answered(response, replica), self._due.popleft(), response.result
        if result.sequence_ids[:] != due.sequence_ids:
            text = f"step {plan.step_id} is answered for other sequences than it has"
            raise ResponseRefused(Refusal.SEQUENCES, text)
        try:
            outcome = outcome_from_proto(result)
        except ValueError as error:
            raise ResponseRefused(Refusal.MALFORMED, f"the answer to step {plan.step_id} has {error}") from None
        if max(result.token_ids[:], default=0) >= self._vocab_size:
            text = f"step {plan.step_id} drew a token beyond the {self._vocab_size} there are"
            raise ResponseRefused(Refusal.TOKENS, text)
        _check_counts(due, result)
        for place, num_likely in due.num_likely.items():
            if outcome.results[place].failure is None:
                self._check_logprobs(due.sequence_ids[place], outcome.results[place], num_likely)
        transfers = [(done.step_id, done.direction) for done in outcome.transfers]
        if len(set(transfers)) < len(transfers) or not all(replica.transfers.knows(*one) for one in transfers):
            text = f"step {plan.step_id} is answered with copies that are not under way"
            raise ResponseRefused(Refusal.TRANSFERS, text)
        return outcome

    def _answered(self, response: worker_v1.StepResponse, replica: Replica) -> StepPlan:
        """The step that a response is due for."""
        epoch, generation = self._opening.epoch, self._opening.generation
        if response.epoch != epoch:
            text = f"an answer of epoch {response.epoch} on a stream of epoch {epoch}"
            raise ResponseRefused(Refusal.EPOCH, text)
        if response.generation != generation:
            text = f"an answer of generation {response.generation} on a stream of generation {generation}"
            raise ResponseRefused(Refusal.GENERATION, text)
        plan = replica.in_flight[0] if replica.in_flight else None
        if plan is None or response.step_id != plan.step_id:
            text = f"an answer to step {response.step_id}, and {'none' if plan is None else plan.step_id} is due"
            raise ResponseRefused(Refusal.STEP, text)
        if not response.HasField("result"):
            raise ResponseRefused(Refusal.MALFORMED, f"the answer to step {plan.step_id} has no result")
        return plan

    def _check_logprobs(self, sequence_id: int, row: Drawn, num_likely: int) -> None:
        told = cast("Seq[worker_v1.TokenLogprobs]", row.logprobs)
        if len(told) != 1 or not _is_sound(told[0], min(num_likely, self._vocab_size), self._vocab_size):
            text = f"sequence {sequence_id} is answered without the log-probabilities that it asks for"
            raise ResponseRefused(Refusal.LOGPROBS, text)


def _check_counts(due: _Due, result: worker_v1.StepResult) -> None:
    """Of each sequence one token is due, or none where it draws none or failed."""
    counts, expected = result.num_tokens[:], due.num_tokens
    if counts == expected and not result.failures:
        return
    expected = expected.copy()
    for failure in result.failures:
        expected[failure.place] = 0
    for sequence_id, num_tokens, num_due in zip(due.sequence_ids, counts, expected, strict=True):
        if num_tokens != num_due:
            text = f"sequence {sequence_id} is answered with {num_tokens} tokens, and {num_due} are due"
            raise ResponseRefused(Refusal.TOKENS, text)


def _is_sound(told: worker_v1.TokenLogprobs, num_likely: int, vocab_size: int) -> bool:
    total = told.logprob
    for likely in told.top:  # in one pass: each look at a message costs
        if likely.token_id >= vocab_size:
            return False
        total += likely.logprob
    return len(told.top) == num_likely and math.isfinite(total)
