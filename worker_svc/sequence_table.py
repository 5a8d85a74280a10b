"""The sequences that a runner knows, and why others have failed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from worker_svc.description import WorkerLimits
from worker_svc.errors import DeviceLost
from worker_svc.launched_step import ScheduledRun
from worker_svc.sequences import InvalidSequence, Sequence
from worker_svc.step import BlockTableUpdate, NewSequence, SequenceResult

if TYPE_CHECKING:  # it imports llguidance, which sequences without grammars do not need
    from worker_svc.grammar import GrammarCompiler


class SequenceTable:
    """Sequences by id, until they are finished. For the runner's thread.

    A sequence that failed fails in every later step too, because steps on their way build on what was not computed.
    """

    def __init__(self, limits: WorkerLimits, grammars: "GrammarCompiler | None" = None) -> None:
        """Without `grammars`, sequences that have one fail."""
        self._limits = limits
        self._grammars = grammars
        self._sequences: dict[int, Sequence] = {}
        self._failures: dict[int, str] = {}

    def clear(self) -> None:
        self._sequences.clear()
        self._failures.clear()

    def add(self, new: NewSequence) -> None:
        try:
            if new.sequence_id in self._sequences or new.sequence_id in self._failures:
                raise InvalidSequence("its id was used before")
            self._sequences[new.sequence_id] = Sequence.from_new_sequence(new, self._limits, self._grammars)
        except InvalidSequence as error:
            self._sequences.pop(new.sequence_id, None)
            self._failures[new.sequence_id] = str(error)

    def update(self, update: BlockTableUpdate) -> None:
        """Replaces a block of a sequence."""
        sequence = self._sequences.get(update.sequence_id)
        if sequence is None:
            return  # it fails when it is scheduled
        try:
            sequence.update(update, self._limits)
        except InvalidSequence as error:
            self.fail(update.sequence_id, str(error))

    def remove(self, finished_ids: Iterable[int]) -> None:
        for sequence_id in finished_ids:
            self._sequences.pop(sequence_id, None)
            self._failures.pop(sequence_id, None)

    def find(self, sequence_id: int) -> Sequence:
        """Raises InvalidSequence where it is not known or has failed."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise InvalidSequence(self._failures.get(sequence_id, "not known"))
        return sequence

    def fail(self, sequence_id: int, reason: str) -> SequenceResult:
        """Fails a sequence in this step and in all later ones, until it is finished."""
        if self._sequences.pop(sequence_id, None) is not None:
            self._failures[sequence_id] = reason
        return SequenceResult(sequence_id, [], failure=reason)

    def fail_run(self, run: ScheduledRun, reason: str) -> None:
        """Fails a sequence that was launched. If it has failed before, it keeps that reason."""
        sequence = run.sequence
        sequence.failure = sequence.failure or reason
        # It may have been finished since the launch, and its id reused.
        if self._sequences.get(run.sequence_id) is sequence:
            self.fail(run.sequence_id, sequence.failure)

    @contextmanager
    def failing_all(self, runs: Iterable[ScheduledRun]) -> Iterator[None]:
        """Fails all these sequences if the block raises: none of their states is known then."""
        try:
            yield
        except torch.AcceleratorError as error:
            # After a CUDA error, every call into its context fails.
            raise DeviceLost("the device failed in a step") from error
        except Exception:
            for run in runs:
                self.fail_run(run, "the step failed")
            raise
