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

from worker_svc.batch import SequenceChunk, make_batch
from worker_svc.block_copier import BlockCopier
from worker_svc.block_hashes import BlockHashTable
from worker_svc.description import WorkerLimits
from worker_svc.errors import DeviceLost
from worker_svc.executor import Executor, SampleHandle
from worker_svc.sampler import SamplerOutput
from worker_svc.sequences import InvalidSequence, Sequence
from worker_svc.step import (
    MAX_IN_FLIGHT,
    BlockTableUpdate,
    NewSequence,
    ScheduledSequence,
    SequenceResult,
    Step,
    StepOutcome,
    TokenLogprobs,
)
from worker_svc.swap_tracker import SwapTracker


class _Run(NamedTuple):
    """A scheduled sequence that runs: its place in the step, and the positions `start` to `end` - 1 that it computes.

    Where it `draws`, the token stands at `end`.
    """

    schedule_index: int
    sequence_id: int
    sequence: Sequence
    start: int
    end: int
    num_cached_tokens: int
    samples: bool

    @property
    def is_decode(self) -> bool:
        """Whether it computes the token drawn last, and no more."""
        return self.end - self.start == 1 and self.start >= self.sequence.prompt_length

    def chunk(self) -> SequenceChunk:
        tokens, blocks = self.sequence.tokens.values, self.sequence.blocks.values
        return SequenceChunk(tokens[self.start : self.end], self.start, blocks, self.num_cached_tokens, self.samples)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched, to be given to `Runner.finish`."""

    step_id: int
    scheduled: list[ScheduledSequence]
    failed: dict[int, SequenceResult]
    """By place, of those scheduled that do not run."""
    runs: list[_Run]
    sample_handle: SampleHandle | None
    pending_copies: "list[Future[Any]]"
    """What must be moved before it is done."""
    started: float

    def is_done(self) -> bool:
        """Whether finishing it would not wait."""
        return (self.sample_handle is None or self.sample_handle.is_done()) and all(
            future.done() for future in self.pending_copies
        )

    def wait(self) -> None:
        """Return when it is done; on any thread."""
        if self.sample_handle is not None:
            self.sample_handle.wait()
        if self.pending_copies:
            wait(self.pending_copies)


class Runner:
    """A model, its paged cache, and the sequences that it knows. To be used by one thread.

    What is wrong with one sequence is that sequence's failure; the others run. A sequence that failed fails in every
    later step too, since steps already on their way build on what was not computed.
    """

    def __init__(self, executor: Executor, limits: WorkerLimits, block_copier: BlockCopier) -> None:
        self.limits = limits
        self.block_hashes = BlockHashTable()
        self._executor = executor
        self._swap_tracker = SwapTracker(block_copier, limits)
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
        self._swap_tracker.cancel_all()
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
        self.block_hashes.update(step.block_hashes, step.host_block_hashes)
        self.block_hashes.invalidate_copied(step.block_ops)
        for sequence_id in step.finished_ids:
            self._sequences.pop(sequence_id, None)
            self._failures.pop(sequence_id, None)
        with self._failing_all([]):
            started_copies = self._swap_tracker.start(step.step_id, step.block_ops)
        for update in step.block_table_updates:
            self._update_block_table(update)
        for new in step.new_sequences:
            self._add_sequence(new)
        runs, failed = self._admit(step.scheduled)
        sample_handle = self._enqueue(runs) if runs else None
        # A scheduler with nothing to compute asks for the transfers that it waits for.
        pending_copies = started_copies if runs else [*started_copies, *self._swap_tracker.pending]
        self._num_in_flight += 1
        return InFlight(step.step_id, step.scheduled, failed, runs, sample_handle, pending_copies, started)

    def finish(self, in_flight: InFlight) -> StepOutcome:
        """Wait for a step that was launched, and take over what it drew. In the order of launches. Raises as `step`."""
        self._num_in_flight -= 1
        runs, results = in_flight.runs, dict(in_flight.failed)
        with self._failing_all(runs):
            output = SamplerOutput([], []) if in_flight.sample_handle is None else in_flight.sample_handle.result()
            for copy in in_flight.pending_copies:
                copy.result()
            swap_results = self._swap_tracker.pop_done(in_flight.step_id)
        sampling_runs = [run for run in runs if run.samples]
        for run, token, logprobs in zip(sampling_runs, output.tokens, output.logprobs, strict=True):
            results[run.schedule_index] = self._apply_sample(run, token, logprobs)
        num_tokens = sum(run.end - run.start for run in runs)
        num_decodes = sum(run.is_decode for run in runs)
        sequences = [
            results[schedule_index] if schedule_index in results else SequenceResult(scheduled.sequence_id, [])
            for schedule_index, scheduled in enumerate(in_flight.scheduled)
        ]
        seconds = time.perf_counter() - in_flight.started
        stall = self._swap_tracker.stall_seconds(in_flight.step_id, swap_results)
        return StepOutcome(sequences, seconds, num_tokens - num_decodes, num_decodes, swap_results, stall)

    def _update_block_table(self, update: BlockTableUpdate) -> None:
        sequence = self._sequences.get(update.sequence_id)
        if sequence is None:
            return  # where it should be known, it fails when it is scheduled
        try:
            sequence.update(update, self.limits)
        except InvalidSequence as error:
            self._fail(update.sequence_id, str(error))

    def _add_sequence(self, new: NewSequence) -> None:
        try:
            if new.sequence_id in self._sequences or new.sequence_id in self._failures:
                raise InvalidSequence("its id was used before")
            self._sequences[new.sequence_id] = Sequence.from_new_sequence(new, self.limits)
        except InvalidSequence as error:
            self._sequences.pop(new.sequence_id, None)
            self._failures[new.sequence_id] = str(error)

    def _admit(self, scheduled: Items[ScheduledSequence]) -> tuple[list[_Run], dict[int, SequenceResult]]:
        """What of the step can run, with its blocks taken over; and by place the failures of the rest.

        Sequences of one token come first: kernels take these apart from the others.
        """
        runs: list[_Run] = []
        failed: dict[int, SequenceResult] = {}
        admitted: set[int] = set()
        tokens_left = self.limits.max_step_tokens
        for schedule_index, item in enumerate(scheduled):
            try:
                if item.sequence_id in admitted:
                    raise InvalidSequence("scheduled twice in one step")
                if len(runs) == self.limits.max_sequences or item.num_tokens > tokens_left:
                    raise InvalidSequence("the step is larger than this worker's budget")
                sequence = self._find(item.sequence_id)
                samples = sequence.validate(item, self.limits)
                if self._swap_tracker.has_invalid_blocks:
                    self._swap_tracker.check_copied(sequence.blocks.values, item.new_block_ids)
            except InvalidSequence as error:
                failed[schedule_index] = self._fail(item.sequence_id, str(error))
                continue
            if item.new_block_ids:
                self._add_blocks(sequence, item)
            tokens_left -= item.num_tokens
            admitted.add(item.sequence_id)
            num_cached_tokens = item.start if item.num_cached_tokens is None else item.num_cached_tokens
            end = item.start + item.num_tokens
            runs.append(_Run(schedule_index, item.sequence_id, sequence, item.start, end, num_cached_tokens, samples))
        runs.sort(key=lambda run: run.end - run.start > 1)
        return runs, failed

    def _add_blocks(self, sequence: Sequence, item: ScheduledSequence) -> None:
        # Those before the first position that is stored are shared: nobody writes them, so they keep their labels.
        first_written_block = max(item.start, item.num_cached_tokens or 0) // self.limits.block_size
        self.block_hashes.invalidate_written(item.new_block_ids[max(0, first_written_block - len(sequence.blocks)) :])
        sequence.blocks.extend(item.new_block_ids)

    def _find(self, sequence_id: int) -> Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise InvalidSequence(self._failures.get(sequence_id, "not known"))
        return sequence

    def _fail(self, sequence_id: int, reason: str) -> SequenceResult:
        """The failure of a sequence, which holds until it is finished."""
        if self._sequences.pop(sequence_id, None) is not None:
            self._failures[sequence_id] = reason
        return SequenceResult(sequence_id, [], failure=reason)

    def _fail_run(self, run: _Run, reason: str) -> None:
        # Its sequence may have been finished since it was launched, and the id be another's by now.
        if self._sequences.get(run.sequence_id) is run.sequence:
            self._fail(run.sequence_id, reason)

    def _enqueue(self, runs: list[_Run]) -> SampleHandle:
        """Have runs computed; what they draw is promised."""
        sequences = [run.sequence for run in runs if run.samples]
        with self._failing_all(runs):
            batch = make_batch([run.chunk() for run in runs], self.limits.block_size)
            handle = self._executor.launch(batch, sequences)
        for run in runs:
            run.sequence.num_computed = run.end
        for sequence, placeholder_token in zip(sequences, handle.placeholder_tokens, strict=True):
            sequence.append_placeholder(placeholder_token)
        return handle

    def _apply_sample(self, run: _Run, token: int | None, logprobs: TokenLogprobs | None) -> SequenceResult:
        """A sequence's result, of the token that it was promised."""
        sequence = run.sequence
        if token is None and sequence.failure is None:
            sequence.failure = "there is no token to draw: the logits are not numbers, or all are suppressed"
            self._fail_run(run, sequence.failure)
        if token is None or sequence.failure is not None:
            return SequenceResult(run.sequence_id, [], failure=sequence.failure)
        sequence.fill_placeholder(run.end, token)
        return SequenceResult(run.sequence_id, [token], () if logprobs is None else (logprobs,))

    @contextmanager
    def _failing_all(self, runs: list[_Run]) -> Iterator[None]:
        """Where this raises, nobody knows what became of any sequence in the step."""
        try:
            yield
        except torch.AcceleratorError as error:
            # After an error of its own a CUDA context fails whatever it is asked.
            raise DeviceLost("the device failed in a step") from error
        except Exception:
            for run in runs:
                run.sequence.failure = run.sequence.failure or "the step failed"
                self._fail_run(run, run.sequence.failure)
            raise
