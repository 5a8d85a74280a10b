"""Checks what a worker answers before the core sees it: a message that is not the answer due is refused whole."""

import math
from collections.abc import Sequence as Seq
from enum import StrEnum
from typing import cast

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.plan import Drawn, Scheduled, StepOutcome, StepPlan
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


def outcome_of(
    response: worker_v1.StepResponse, opening: worker_v1.StepRequest, replica: Replica, vocab_size: int
) -> StepOutcome:
    """What came of the oldest step in flight on the stream that `opening` opened. Raises ResponseRefused."""
    plan = _answered(response, opening, replica)
    if list(response.result.sequence_ids) != [part.sequence.id for part in plan.scheduled]:
        raise ResponseRefused(Refusal.SEQUENCES, f"step {plan.step_id} is answered for other sequences than it has")
    try:
        outcome = outcome_from_proto(response.result)
    except ValueError as error:
        raise ResponseRefused(Refusal.MALFORMED, f"the answer to step {plan.step_id} has {error}") from None
    if max(response.result.token_ids, default=0) >= vocab_size:
        raise ResponseRefused(Refusal.TOKENS, f"step {plan.step_id} drew a token beyond the {vocab_size} there are")
    for part, row in zip(plan.scheduled, outcome.results, strict=True):
        _check_row(part, row, vocab_size)
    transfers = [(done.step_id, done.direction) for done in outcome.transfers]
    if len(set(transfers)) < len(transfers) or not all(replica.transfers.knows(*transfer) for transfer in transfers):
        raise ResponseRefused(Refusal.TRANSFERS, f"step {plan.step_id} is answered with copies that are not under way")
    return outcome


def _answered(response: worker_v1.StepResponse, opening: worker_v1.StepRequest, replica: Replica) -> StepPlan:
    """The step that a response is due for."""
    if response.epoch != opening.epoch:
        text = f"an answer of epoch {response.epoch} on a stream of epoch {opening.epoch}"
        raise ResponseRefused(Refusal.EPOCH, text)
    if response.generation != opening.generation:
        text = f"an answer of generation {response.generation} on a stream of generation {opening.generation}"
        raise ResponseRefused(Refusal.GENERATION, text)
    due = replica.in_flight[0] if replica.in_flight else None
    if due is None or response.step_id != due.step_id:
        text = f"an answer to step {response.step_id}, and {'none' if due is None else due.step_id} is due"
        raise ResponseRefused(Refusal.STEP, text)
    if not response.HasField("result"):
        raise ResponseRefused(Refusal.MALFORMED, f"the answer to step {due.step_id} has no result")
    return due


def _check_row(part: Scheduled, row: Drawn, vocab_size: int) -> None:
    num_due = int(part.draws and row.failure is None)
    if len(row.token_ids) != num_due:
        text = f"sequence {part.sequence.id} is answered with {len(row.token_ids)} tokens, and {num_due} are due"
        raise ResponseRefused(Refusal.TOKENS, text)
    sampling = cast(worker_v1.SamplingParams, part.sequence.request.sampling)
    if num_due and sampling.HasField("logprobs"):
        told = cast("Seq[worker_v1.TokenLogprobs]", row.logprobs)
        num_top = min(sampling.logprobs, vocab_size)
        if len(told) != num_due or not all(_is_sound(token, num_top, vocab_size) for token in told):
            text = f"sequence {part.sequence.id} is answered without the log-probabilities that it asks for"
            raise ResponseRefused(Refusal.LOGPROBS, text)


def _is_sound(told: worker_v1.TokenLogprobs, num_top: int, vocab_size: int) -> bool:
    total = told.logprob
    for likely in told.top:  # in one pass: each look at a message costs
        if likely.token_id >= vocab_size:
            return False
        total += likely.logprob
    return len(told.top) == num_top and math.isfinite(total)
