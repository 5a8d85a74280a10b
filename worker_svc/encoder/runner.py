"""Runs steps of an encoder: one forward pass over the prompts of a step, and one value for each."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker_svc.block_hashes import BlockHashTable
from worker_svc.description import WorkerLimits
from worker_svc.encoder.pooling import Pooler
from worker_svc.errors import DeviceLost
from worker_svc.out_of_memory import OUT_OF_MEMORY, leave_out_newest
from worker_svc.step import FailureReason, NewSequence, ScheduledSequence, SequenceResult, Step, StepOutcome
from worker_svc.wanted_states import Places


class EncoderForward(Protocol):
    """A backend of an encoder."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None, places: Places = None
    ) -> list[torch.Tensor]:
        """The last hidden states of each prompt [num_tokens, hidden_size], or that of the one token that `places` name
        [1, hidden_size]. No prompt is empty. `num_first` is how many tokens of each prompt are of the first type, at
        least one; None: all.
        """


class _InvalidSequence(Exception):  # noqa: N818
    """A sequence that is not computed. The text is for the operator."""


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompts of a step whose values are computed."""

    requested: Sequence[NewSequence]

    @property
    def sequence_ids(self) -> list[int]:
        return [new.sequence_id for new in self.requested]

    def without(self, sequence_id: int) -> "_Prompts":
        return _Prompts([new for new in self.requested if new.sequence_id != sequence_id])


@dataclass(frozen=True, slots=True)
class _FinishedStep:
    """A step that is done when it is launched: its prompts share nothing with the next one."""

    outcome: StepOutcome

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Returns at once."""


class EncoderRunner:
    """An encoder, and the prompts whose values it has not returned. For one thread. It has no blocks.

    An error of one sequence is that sequence's failure; the others run.
    """

    def __init__(
        self,
        forward: EncoderForward,
        pooler: Pooler,
        limits: WorkerLimits,
        *,
        deterministic: bool = False,
        is_batch_invariant: bool = False,
    ) -> None:
        """With `deterministic` a value's bits do not depend on the step's other prompts: each is computed alone.

        `is_batch_invariant`: hidden states' bits never depend on other prompts. Then only values are made one by one.
        """
        self.limits = limits
        self.block_hashes = BlockHashTable()
        self._forward = forward
        self._pooler = pooler
        self._pools_alone = deterministic
        self._runs_alone = deterministic and not is_batch_invariant
        self._known: dict[int, NewSequence] = {}

    def reset(self) -> None:
        """Forgets all sequences."""
        self._known.clear()

    def close(self) -> None:
        """Drops the model and all sequences. Nothing is called after it."""
        self.reset()
        del self._forward, self._pooler

    def step(self, step: Step) -> StepOutcome:
        """Runs one step. Raises DeviceLost, and any error of the forward pass."""
        return self.finish(self.launch(step))

    @torch.inference_mode()
    def launch(self, step: Step) -> _FinishedStep:
        """Runs a step. Raises as `step` does."""
        started = time.perf_counter()
        for sequence_id in step.finished_ids:
            self._known.pop(sequence_id, None)
        self._known |= {new.sequence_id: new for new in step.new_sequences}
        results: dict[int, SequenceResult] = {}
        requested: list[tuple[int, NewSequence]] = []
        for schedule_index, scheduled in enumerate(step.scheduled):
            try:
                requested.append((schedule_index, self._validate(scheduled)))
            except _InvalidSequence as error:
                results[schedule_index] = SequenceResult(scheduled.sequence_id, [], failure=str(error))
        values = self._values_within_memory([new for _, new in requested])
        for (schedule_index, new), value in zip(requested, values, strict=True):
            if value is None:
                results[schedule_index] = SequenceResult(
                    new.sequence_id, [], failure=OUT_OF_MEMORY, failure_reason=FailureReason.OUT_OF_MEMORY
                )
                continue
            is_finite = all(map(math.isfinite, value))
            if is_finite:
                self._known.pop(new.sequence_id, None)  # its value ends it
            results[schedule_index] = SequenceResult(
                new.sequence_id,
                [],
                value=value if is_finite else (),
                failure=None if is_finite else f"its {new.result} is not finite",
            )
        ordered = [results[schedule_index] for schedule_index in range(len(step.scheduled))]
        num_tokens = sum(len(new.token_ids) for _, new in requested)
        seconds, num_left_out = time.perf_counter() - started, sum(value is None for value in values)
        return _FinishedStep(StepOutcome(ordered, seconds, prefill_tokens=num_tokens, num_left_out=num_left_out))

    def finish(self, launched: _FinishedStep) -> StepOutcome:
        return launched.outcome

    def _values_within_memory(self, requested: Sequence[NewSequence]) -> list[list[float] | None]:
        """The values of a step; None for the newest ones if memory does not suffice for all."""
        values, left_out = leave_out_newest(lambda prompts: self._values(prompts.requested), _Prompts(requested))
        computed = iter(values or ())
        return [None if new.sequence_id in left_out else next(computed) for new in requested]

    def _values(self, requested: Sequence[NewSequence]) -> list[list[float]]:
        if not requested:
            return []
        alone = [[new] for new in requested]
        try:
            passes = alone if self._runs_alone else [requested]
            hidden = [states for together in passes for states in self._hidden(together)]
            if not self._pools_alone:
                return self._pooler(hidden, requested)
            pairs = zip(hidden, alone, strict=True)
            return [value for states, together in pairs for value in self._pooler([states], together)]
        except torch.AcceleratorError as error:
            # After a CUDA error, every call into its context fails.
            raise DeviceLost("the device failed in a step") from error

    def _hidden(self, together: Sequence[NewSequence]) -> list[torch.Tensor]:
        """The hidden states of one forward pass."""
        num_first = None
        if any(new.score.num_first_tokens for new in together):
            num_first = [new.score.num_first_tokens or len(new.token_ids) for new in together]
        places = list(map(self._pooler.place, together))
        return self._forward([new.token_ids for new in together], num_first, places)

    def _validate(self, scheduled: ScheduledSequence) -> NewSequence:
        new = self._known.get(scheduled.sequence_id)
        if new is None:
            raise _InvalidSequence("not known")
        if new.result != self._pooler.result:
            raise _InvalidSequence(f"this model computes {self._pooler.result}, and not {new.result}")
        length = len(new.token_ids)
        if scheduled.start != 0 or scheduled.num_tokens != length or scheduled.new_block_ids:
            raise _InvalidSequence("an encoder computes a prompt as a whole, and without blocks")
        if not 0 < length <= self.limits.context_length:
            raise _InvalidSequence(f"{length} tokens, where 1 to {self.limits.context_length} fit")
        if not (min(new.token_ids) >= 0 and max(new.token_ids) < self.limits.vocab_size):
            raise _InvalidSequence("a token id is not in the vocabulary")
        return new
