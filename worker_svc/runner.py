"""Runs steps: one forward pass over all tokens of a step, then one draw for each sequence that is due one.

A step runs in two halves, so that the next one can be on its way to the device before the draws of this one are back:
`launch` admits, lays out and enqueues it, `finish` takes over what was drawn.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from worker_svc.batch import Chunk, make_batch
from worker_svc.errors import DeviceLost
from worker_svc.executor import Drawing, Executor
from worker_svc.identity import Limits
from worker_svc.labels import Labels
from worker_svc.mover import Mover
from worker_svc.sampler import Draws
from worker_svc.sequences import Refused, Sequence
from worker_svc.step import (
    MAX_IN_FLIGHT,
    NewSequence,
    ScheduledSequence,
    SequenceResult,
    Step,
    StepOutcome,
    TableChange,
    TokenLogprobs,
)
from worker_svc.transfers import Transfers


class _Run(NamedTuple):
    """A scheduled sequence that runs: its place in the step, and the positions `start` to `end` - 1 that it computes.

    Where it `draws`, the token stands at `end`.
    """

    place: int
    sequence_id: int
    sequence: Sequence
    start: int
    end: int
    store_start: int
    draws: bool

    @property
    def decodes(self) -> bool:
        """Whether it computes the token drawn last, and no more."""
        return self.end - self.start == 1 and self.start >= self.sequence.prompt_length

    def chunk(self) -> Chunk:
        tokens, blocks = self.sequence.tokens.values, self.sequence.blocks.values
        return Chunk(tokens[self.start : self.end], self.start, blocks, self.store_start, self.draws)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched, to be given to `Runner.finish`."""

    step_id: int
    scheduled: list[ScheduledSequence]
    failed: dict[int, SequenceResult]
    """By place, of those scheduled that do not run."""
    runs: list[_Run]
    drawing: Drawing | None
    moving: "list[Future[Any]]"
    """What must be moved before it is done."""
    started: float

    def is_done(self) -> bool:
        """Whether finishing it would not wait."""
        return (self.drawing is None or self.drawing.is_done()) and all(future.done() for future in self.moving)

    def wait(self) -> None:
        """Return when it is done; on any thread."""
        if self.drawing is not None:
            self.drawing.wait()
        if self.moving:
            wait(self.moving)


class Runner:
    """A model, its paged cache, and the sequences that it knows. To be used by one thread.

    What is wrong with one sequence is that sequence's failure; the others run. A sequence that failed fails in every
    later step too, since steps already on their way build on what was not computed.
    """

    def __init__(self, executor: Executor, limits: Limits, mover: Mover) -> None:
        self.limits = limits
        self.labels = Labels()
        self._executor = executor
        self._transfers = Transfers(mover, limits)
        self._sequences: dict[int, Sequence] = {}
        self._failures: dict[int, str] = {}
        self._num_in_flight = 0

    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight; on any thread."""
        return self._num_in_flight == 0

    def reset(self) -> None:
        """Forget all sequences, and give up all transfers. Blocks keep their labels.

        No step may be in flight.
        """
        self._transfers.drop()
        self._sequences.clear()
        self._failures.clear()

    def step(self, step: Step) -> StepOutcome:
        """Run one step. It raises only for a fault of ours or of the device; then every sequence in it has failed."""
        return self.finish(self.launch(step))

    @torch.inference_mode()
    def launch(self, step: Step) -> InFlight:
        """Begin a step, behind no more than one that is not finished yet. Raises as `step` does.

        Where it raises there is nothing to finish.
        """
        if self._num_in_flight == MAX_IN_FLIGHT:
            raise RuntimeError(f"a step launched behind {MAX_IN_FLIGHT} that are not finished")
        started = time.perf_counter()
        self.labels.give(step.labels, step.host_labels)
        self.labels.drop_moved(step.moves)
        for sequence_id in step.finished_ids:
            self._sequences.pop(sequence_id, None)
            self._failures.pop(sequence_id, None)
        with self._failing_together([]):
            copying = self._transfers.begin(step.step_id, step.moves)
        for change in step.table_changes:
            self._change(change)
        for new in step.new_sequences:
            self._learn(new)
        runs, failed = self._admit(step.scheduled)
        drawing = self._enqueue(runs) if runs else None
        # A scheduler with nothing to compute asks for the transfers that it waits for.
        moving = copying if runs else [*copying, *self._transfers.pending]
        self._num_in_flight += 1
        return InFlight(step.step_id, step.scheduled, failed, runs, drawing, moving, started)

    def finish(self, in_flight: InFlight) -> StepOutcome:
        """Wait for a step that was launched, and take over what it drew. In the order of launches. Raises as `step`."""
        self._num_in_flight -= 1
        runs, results = in_flight.runs, dict(in_flight.failed)
        with self._failing_together(runs):
            draws = Draws([], []) if in_flight.drawing is None else in_flight.drawing.result()
            for moved in in_flight.moving:
                moved.result()
            transfers = self._transfers.take_done(in_flight.step_id)
        drawing = [run for run in runs if run.draws]
        for run, token, told in zip(drawing, draws.tokens, draws.logprobs, strict=True):
            results[run.place] = self._take_over(run, token, told)
        num_tokens = sum(run.end - run.start for run in runs)
        num_decodes = sum(run.decodes for run in runs)
        sequences = [
            results[place] if place in results else SequenceResult(scheduled.sequence_id, [])
            for place, scheduled in enumerate(in_flight.scheduled)
        ]
        seconds = time.perf_counter() - in_flight.started
        held_up = self._transfers.held_up_seconds(in_flight.step_id, transfers)
        return StepOutcome(sequences, seconds, num_tokens - num_decodes, num_decodes, transfers, held_up)

    def _change(self, change: TableChange) -> None:
        sequence = self._sequences.get(change.sequence_id)
        if sequence is None:
            return  # where it should be known, it fails when it is scheduled
        try:
            sequence.change(change, self.limits)
        except Refused as refusal:
            self._fail(change.sequence_id, str(refusal))

    def _learn(self, new: NewSequence) -> None:
        try:
            if new.sequence_id in self._sequences or new.sequence_id in self._failures:
                raise Refused("its id was used before")
            self._sequences[new.sequence_id] = Sequence.learn(new, self.limits)
        except Refused as refusal:
            self._sequences.pop(new.sequence_id, None)
            self._failures[new.sequence_id] = str(refusal)

    def _admit(self, scheduled: Items[ScheduledSequence]) -> tuple[list[_Run], dict[int, SequenceResult]]:
        """What of the step can run, with its blocks taken over; and by place the failures of the rest.

        Sequences of one token come first: kernels take these apart from the others.
        """
        runs: list[_Run] = []
        failed: dict[int, SequenceResult] = {}
        admitted: set[int] = set()
        tokens_left = self.limits.max_step_tokens
        for place, item in enumerate(scheduled):
            try:
                if item.sequence_id in admitted:
                    raise Refused("scheduled twice in one step")
                if len(runs) == self.limits.max_sequences or item.num_tokens > tokens_left:
                    raise Refused("the step is larger than this worker's budget")
                sequence = self._find(item.sequence_id)
                draws = sequence.check(item, self.limits)
                if self._transfers.has_spoiled:
                    self._transfers.check_copied(sequence.blocks.values, item.new_block_ids)
            except Refused as refusal:
                failed[place] = self._fail(item.sequence_id, str(refusal))
                continue
            if item.new_block_ids:
                self._add_blocks(sequence, item)
            tokens_left -= item.num_tokens
            admitted.add(item.sequence_id)
            store_start = item.start if item.store_start is None else item.store_start
            end = item.start + item.num_tokens
            runs.append(_Run(place, item.sequence_id, sequence, item.start, end, store_start, draws))
        runs.sort(key=lambda run: run.end - run.start > 1)
        return runs, failed

    def _add_blocks(self, sequence: Sequence, item: ScheduledSequence) -> None:
        # Those before the first position that is stored are shared: nobody writes them, so they keep their labels.
        first_stored = max(item.start, item.store_start or 0) // self.limits.block_size
        self.labels.drop_written(item.new_block_ids[max(0, first_stored - len(sequence.blocks)) :])
        sequence.blocks.extend(item.new_block_ids)

    def _find(self, sequence_id: int) -> Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise Refused(self._failures.get(sequence_id, "not known"))
        return sequence

    def _fail(self, sequence_id: int, why: str) -> SequenceResult:
        """The failure of a sequence, which holds until it is finished."""
        if self._sequences.pop(sequence_id, None) is not None:
            self._failures[sequence_id] = why
        return SequenceResult(sequence_id, [], failure=why)

    def _fail_run(self, run: _Run, why: str) -> None:
        # Its sequence may have been finished since it was launched, and the id be another's by now.
        if self._sequences.get(run.sequence_id) is run.sequence:
            self._fail(run.sequence_id, why)

    def _enqueue(self, runs: list[_Run]) -> Drawing:
        """Have runs computed; what they draw is promised."""
        drawing = [run.sequence for run in runs if run.draws]
        with self._failing_together(runs):
            batch = make_batch([run.chunk() for run in runs], self.limits.block_size)
            draws = self._executor.launch(batch, drawing)
        for run in runs:
            run.sequence.num_computed = run.end
        for sequence, stand_in in zip(drawing, draws.stand_ins, strict=True):
            sequence.promise(stand_in)
        return draws

    def _take_over(self, run: _Run, token: int | None, told: TokenLogprobs | None) -> SequenceResult:
        """A sequence's result, of the token that it was promised."""
        sequence = run.sequence
        if token is None and sequence.lost is None:
            sequence.lost = "there is no token to draw: the logits are not numbers, or all are suppressed"
            self._fail_run(run, sequence.lost)
        if token is None or sequence.lost is not None:
            return SequenceResult(run.sequence_id, [], failure=sequence.lost)
        sequence.settle(run.end, token)
        return SequenceResult(run.sequence_id, [token], () if told is None else (told,))

    @contextmanager
    def _failing_together(self, runs: list[_Run]) -> Iterator[None]:
        """Where this raises, nobody knows what became of any sequence in the step."""
        try:
            yield
        except torch.AcceleratorError as error:
            # After an error of its own a CUDA context fails whatever it is asked.
            raise DeviceLost("the device failed in a step") from error
        except Exception:
            for run in runs:
                run.sequence.lost = run.sequence.lost or "the step failed"
                self._fail_run(run, run.sequence.lost)
            raise
