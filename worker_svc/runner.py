"""Runs steps: one forward pass over all tokens of a step, then one sampled token for each sequence that needs one.

A step runs in two halves, so that the next step is on its way to the device before this one's tokens are back: `launch`
validates, lays out and enqueues it; `finish` applies the sampled tokens.

With a drafter, draft tokens may be computed after a sequence's last known token, and a token is sampled after each.
Which of them count, and where the sequence continues, is known only after sampling. So a step that may have drafts, or
follows one that has, is laid out after the step ahead has sampled; other steps are laid out while it runs.
"""

import time
from collections import deque
from collections.abc import Sequence as Items
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from worker_svc.batch import make_batch
from worker_svc.block_copier import BlockCopier
from worker_svc.block_hashes import BlockHashTable
from worker_svc.description import WorkerLimits
from worker_svc.drafting import DrafterFactory, Drafting
from worker_svc.executor import Executor, SampleHandle
from worker_svc.grammar_delays import delay_unready
from worker_svc.launched_step import LaunchedStep, ScheduledRun
from worker_svc.sample_applier import SampleApplier
from worker_svc.sequence_table import SequenceTable
from worker_svc.sequences import InvalidSequence, Sequence
from worker_svc.step import MAX_STEPS_IN_FLIGHT, ScheduledSequence, SequenceResult, Step, StepOutcome
from worker_svc.swap_tracker import SwapTracker

if TYPE_CHECKING:  # it imports llguidance, which sequences without grammars do not need
    from worker_svc.grammar import GrammarCompiler


class Runner:
    """A model, its paged cache, and the sequences that it knows. For one thread.

    An error of one sequence is that sequence's failure; the others run.
    """

    def __init__(
        self,
        executor: Executor,
        limits: WorkerLimits,
        block_copier: BlockCopier,
        make_drafter: DrafterFactory | None = None,
        grammars: "GrammarCompiler | None" = None,
    ) -> None:
        """`make_drafter` is required if `limits` have draft tokens, `grammars` for sequences with a grammar."""
        self.limits = limits
        self.block_hashes = BlockHashTable()
        self._executor = executor
        self._swap_tracker = SwapTracker(block_copier, limits)
        self._sequences = SequenceTable(limits, grammars)
        self._drafting = None if make_drafter is None else Drafting(make_drafter, limits.vocab_size)
        self._samples = SampleApplier(self._sequences, self.block_hashes, self._drafting, limits.max_scored_rows)
        self._launched: deque[LaunchedStep] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight. Any thread may read it."""
        return not self._launched

    def reset(self) -> None:
        """Forgets all sequences and cancels all swaps. Blocks keep their hashes.

        No step may be in flight.
        """
        self._swap_tracker.cancel_all()
        self._sequences.clear()

    def close(self) -> None:
        """Drops the model, its cache, and all sequences; the threads of their parts end with them. No step may be in
        flight, and nothing is called after it.
        """
        # Not by `reset`: at the end of the process the copier has no thread any more.
        del self._executor, self._swap_tracker, self._sequences, self._drafting, self._samples

    def step(self, step: Step) -> StepOutcome:
        """Runs one step. Raises only for an internal error or one of the device; then every sequence in it has
        failed.
        """
        return self.finish(self.launch(step))

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep:
        """Starts a step; at most one other step may be unfinished. Raises as `step` does, and then there is nothing to
        finish.
        """
        if len(self._launched) == MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(f"a step launched while {MAX_STEPS_IN_FLIGHT} are not finished")
        started = time.perf_counter()
        self.block_hashes.update(step.block_hashes, step.host_block_hashes)
        self.block_hashes.invalidate_copied(step.block_ops)
        self.block_hashes.invalidate_discarded(step.discarded_blocks, step.discarded_host_blocks)
        self._sequences.remove(step.finished_ids)
        with self._sequences.failing_all([]):
            self._swap_tracker.discard(step.discarded_blocks, step.discarded_host_blocks)
            started_copies = self._swap_tracker.start(step.step_id, step.block_ops)
        for update in step.block_table_updates:
            self._sequences.update(update)
        for new in step.new_sequences:
            self._sequences.add(new)
        if self._drafting is not None:
            self._wait_for_drafts_ahead(step)
        runs, failed = self._admit(step.scheduled)
        runs, delayed = delay_unready(runs)
        # Kernels handle sequences of one token separately, and before the others.
        runs.sort(key=lambda run: (run.end - run.start > 1 and run.end - run.chunk_start > 1) or run.draft != ())
        has_drafts = self._drafting is not None and any(run.draft for run in runs)
        sample_handle = self._enqueue(runs, has_drafts) if runs else None
        for run in delayed:
            # The scheduler assumes that its last token is computed, until it knows that none was sampled.
            run.sequence.num_computed, run.sequence.assumed_start = run.end - 1, run.end
        # A scheduler with nothing to compute sends an empty step to wait for its swaps.
        pending_copies = started_copies if runs or delayed else [*started_copies, *self._swap_tracker.pending]
        launched = LaunchedStep(
            step.step_id, step.scheduled, failed, runs, has_drafts, sample_handle, pending_copies, started
        )
        self._launched.append(launched)
        return launched

    def finish(self, launched: LaunchedStep) -> StepOutcome:
        """Waits for a launched step and applies its sampled tokens. In the order of launches. Raises as `step`."""
        self._launched.popleft()
        self._samples.apply(launched)
        with self._sequences.failing_all(launched.runs):
            for copy in launched.pending_copies:
                copy.result()
            swap_results = self._swap_tracker.pop_done(launched.step_id)
        return launched.outcome(swap_results, self._swap_tracker.stall_seconds(launched.step_id, swap_results))

    def _wait_for_drafts_ahead(self, step: Step) -> None:
        """Waits for the step ahead to sample if this step may have drafts or that one has."""
        for ahead in self._launched:
            if ahead.has_drafts or any(item.max_extra_tokens for item in step.scheduled):
                with suppress(Exception):  # `finish` raises it again
                    self._samples.apply(ahead)

    def _admit(self, scheduled: Items[ScheduledSequence]) -> tuple[list[ScheduledRun], dict[int, SequenceResult]]:
        """The sequences of the step that can run, with their new blocks; and the failures of the others, by index.

        Drafts take the rest of the step's token budget.
        """
        runs: list[ScheduledRun] = []
        failed: dict[int, SequenceResult] = {}
        admitted: set[int] = set()
        tokens_left = self.limits.max_step_tokens
        for schedule_index, item in enumerate(scheduled):
            try:
                if item.sequence_id in admitted:
                    raise InvalidSequence("scheduled twice in one step")
                if len(runs) == self.limits.max_sequences or item.num_tokens > tokens_left:
                    raise InvalidSequence("the step is larger than this worker's budget")
                run = self._begin_run(schedule_index, item)
            except InvalidSequence as error:
                failed[schedule_index] = self._sequences.fail(item.sequence_id, str(error))
                continue
            tokens_left -= item.num_tokens
            admitted.add(item.sequence_id)
            runs.append(run)
        if self._drafting is not None:
            runs = self._draft(self._drafting, runs, scheduled, tokens_left)
        return runs, failed

    def _begin_run(self, schedule_index: int, item: ScheduledSequence) -> ScheduledRun:
        """The run of a scheduled sequence, which gets its new blocks. Raises InvalidSequence, and then it gets none."""
        sequence = self._sequences.find(item.sequence_id)
        start, samples = sequence.validate(item, self.limits)
        if self._swap_tracker.has_invalid_blocks:
            self._swap_tracker.check_copied(sequence.blocks.values, item.new_block_ids)
        if item.num_cached_tokens is not None:
            sequence.num_cached_tokens = item.num_cached_tokens
        if item.new_block_ids:
            self._add_blocks(sequence, start, item.new_block_ids)
        return ScheduledRun(schedule_index, item.sequence_id, sequence, start, start + item.num_tokens, samples)

    def _draft(
        self, drafting: Drafting, runs: list[ScheduledRun], scheduled: Items[ScheduledSequence], tokens_left: int
    ) -> list[ScheduledRun]:
        """The same runs, with drafts for sequences of one token. All drafts together have at most `tokens_left`
        tokens.
        """
        drafted = []
        for run in runs:
            is_single = run.samples and run.end - run.start == 1
            count = min(scheduled[run.schedule_index].max_extra_tokens, tokens_left) if is_single else 0
            if count and self._executor.can_verify(run.sequence.params):
                run = run._replace(draft=drafting.draft(run.sequence, count))
                tokens_left -= len(run.draft)
            drafted.append(run)
        return drafted

    def _add_blocks(self, sequence: Sequence, start: int, new_block_ids: list[int]) -> None:
        # Blocks before the first stored position are shared and not written, so they keep their hashes.
        first_written_block = max(start, sequence.num_cached_tokens) // self.limits.block_size
        self.block_hashes.invalidate_written(new_block_ids[max(0, first_written_block - len(sequence.blocks)) :])
        sequence.blocks.extend(new_block_ids)

    def _enqueue(self, runs: list[ScheduledRun], has_drafts: bool) -> SampleHandle:
        """Launches these runs. Their tokens are promised, unless some have drafts."""
        sequences = [run.sequence for run in runs if run.samples]
        drafts = [run.draft for run in runs if run.samples] if has_drafts else ()
        with self._sequences.failing_all(runs):
            ids = [run.sequence_id for run in runs]
            batch = make_batch([run.chunk() for run in runs], self.limits.block_size, ids)
            rows, size = self.limits.max_scored_rows, self.limits.block_size
            scoring = [run for run in runs if run.sequence.num_top_of_prompt is not None]
            pieces = [piece for run in scoring for piece in run.prompt_pieces(rows, size)]
            handle = self._executor.launch(batch, sequences, drafts, pieces)
        for run in runs:
            sequence = run.sequence
            sequence.num_computed = sequence.assumed_start = run.end
        if not has_drafts:
            for sequence, placeholder_token in zip(sequences, handle.placeholder_tokens, strict=True):
                sequence.append_placeholder(placeholder_token)
        return handle
