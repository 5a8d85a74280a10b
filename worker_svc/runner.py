"""Runs steps: one forward pass over all tokens of a step, then one sampled token for each sequence that needs one.

A step runs in two halves, so that the next step is on its way to the device before this one's tokens are back: `launch`
validates, lays out and enqueues it; `finish` applies the sampled tokens.

With a drafter, draft tokens may be computed after a sequence's last known token, and a token is sampled after each.
Which of them count, and where the sequence continues, is known only after sampling. So a step that may have drafts, or
follows one that has, is laid out after the step ahead has sampled; other steps are laid out while it runs.
"""

import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING

import torch

from worker_svc.batch import make_batch
from worker_svc.block_copier import BlockCopier
from worker_svc.block_hashes import BlockHashTable
from worker_svc.description import WorkerLimits
from worker_svc.drafting import DrafterFactory, Drafting
from worker_svc.errors import DeviceLost
from worker_svc.executor import Executor, SampleHandle
from worker_svc.launched_step import LaunchedStep, ScheduledRun
from worker_svc.out_of_memory import OUT_OF_MEMORY
from worker_svc.sampler import SamplerOutput, num_accepted
from worker_svc.sequences import InvalidSequence, Sequence
from worker_svc.step import (
    MAX_STEPS_IN_FLIGHT,
    BlockTableUpdate,
    FailureReason,
    NewSequence,
    ScheduledSequence,
    SequenceResult,
    Step,
    StepOutcome,
    TokenLogprobs,
)
from worker_svc.swap_tracker import SwapTracker

if TYPE_CHECKING:  # it imports llguidance, which sequences without grammars do not need
    from worker_svc.grammar import GrammarCompiler

# For which a step waits for the grammars of its new sequences; or of all, if it has no others. Usual grammars are
# compiled in 1 ms.
_MAX_WAIT_SECONDS = 0.005
_NO_TOKEN = "there is no token to sample: the logits are not finite, or all tokens are suppressed"


class Runner:
    """A model, its paged cache, and the sequences that it knows. For one thread.

    An error of one sequence is that sequence's failure; the others run. A sequence that failed fails in every later
    step too, because steps on their way build on what was not computed.
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
        self._grammars = grammars
        self._swap_tracker = SwapTracker(block_copier, limits)
        self._sequences: dict[int, Sequence] = {}
        self._failures: dict[int, str] = {}
        self._drafting = None if make_drafter is None else Drafting(make_drafter, limits.vocab_size)
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
        self._failures.clear()

    def close(self) -> None:
        """Drops the model, its cache, and all sequences; the threads of their parts end with them. No step may be in
        flight, and nothing is called after it.
        """
        # Not by `reset`: at the end of the process the copier has no thread any more.
        self._sequences.clear()
        self._failures.clear()
        del self._executor, self._swap_tracker, self._grammars, self._drafting

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
        for sequence_id in step.finished_ids:
            self._sequences.pop(sequence_id, None)
            self._failures.pop(sequence_id, None)
        with self._failing_all([]):
            self._swap_tracker.discard(step.discarded_blocks, step.discarded_host_blocks)
            started_copies = self._swap_tracker.start(step.step_id, step.block_ops)
        for update in step.block_table_updates:
            self._update_block_table(update)
        for new in step.new_sequences:
            self._add_sequence(new)
        if self._drafting is not None:
            self._wait_for_drafts_ahead(step)
        runs, failed = self._admit(step.scheduled)
        runs, delayed = self._delay_unready(runs)
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
        runs, results = launched.runs, launched.results
        self._apply(launched)
        with self._failing_all(runs):
            for copy in launched.pending_copies:
                copy.result()
            swap_results = self._swap_tracker.pop_done(launched.step_id)
        num_tokens = sum(run.end - run.start for run in runs)
        num_decodes = sum(run.is_decode for run in runs)
        drafted = [run for run in runs if run.draft] if launched.has_drafts else []
        sequences = [
            results[schedule_index] if schedule_index in results else SequenceResult(scheduled.sequence_id, [])
            for schedule_index, scheduled in enumerate(launched.scheduled)
        ]
        return StepOutcome(
            sequences,
            time.perf_counter() - launched.started,
            num_tokens - num_decodes,
            num_decodes,
            swap_results,
            self._swap_tracker.stall_seconds(launched.step_id, swap_results),
            draft_tokens=sum(len(run.draft) for run in drafted),
            accepted_tokens=sum(max(0, len(results[run.schedule_index].token_ids) - 1) for run in drafted),
            num_left_out=launched.num_left_out,
        )

    def _wait_for_drafts_ahead(self, step: Step) -> None:
        """Waits for the step ahead to sample if this step may have drafts or that one has."""
        for ahead in self._launched:
            if ahead.has_drafts or any(item.max_extra_tokens for item in step.scheduled):
                with suppress(Exception):  # `finish` raises it again
                    self._apply(ahead)

    def _apply(self, launched: LaunchedStep) -> None:
        """Waits for a step's sampled tokens and adds them to their sequences, once. Raises as `step`."""
        if launched.is_applied:
            return
        with self._failing_all(launched.runs):
            output = SamplerOutput([], []) if launched.sample_handle is None else launched.sample_handle.result()
        sampling = [run for run in launched.runs if run.samples]
        prompt_logprobs, failed = launched.prompt_logprobs(output, self.limits.max_scored_rows)
        left_out = [run for run in launched.runs if run.sequence_id in output.left_out] if output.left_out else []
        launched.num_left_out = sum(run.sequence.failure is None for run in left_out)
        for run in left_out:
            run.sequence.failure = run.sequence.failure or OUT_OF_MEMORY
            self._fail_run(run, run.sequence.failure)
        if launched.has_drafts:
            rows = zip(output.tokens, output.logprobs, strict=True)
            for run in sampling:
                result = self._apply_verified(run, list(islice(rows, 1 + len(run.draft))))
                launched.results[run.schedule_index] = result
        else:
            for run, token, logprobs in zip(sampling, output.tokens, output.logprobs, strict=True):
                launched.results[run.schedule_index] = self._apply_sample(run, token, logprobs)
        for run in (*failed, *left_out):
            launched.results[run.schedule_index] = self._fail_without_token(run)
        for schedule_index, found in prompt_logprobs.items():
            sequence_id = launched.scheduled[schedule_index].sequence_id
            result = launched.results.get(schedule_index, SequenceResult(sequence_id, []))
            if result.failure is None:
                launched.results[schedule_index] = result._replace(prompt_logprobs=found)
        launched.is_applied = True

    def _update_block_table(self, update: BlockTableUpdate) -> None:
        sequence = self._sequences.get(update.sequence_id)
        if sequence is None:
            return  # it fails when it is scheduled
        try:
            sequence.update(update, self.limits)
        except InvalidSequence as error:
            self._fail(update.sequence_id, str(error))

    def _add_sequence(self, new: NewSequence) -> None:
        try:
            if new.sequence_id in self._sequences or new.sequence_id in self._failures:
                raise InvalidSequence("its id was used before")
            self._sequences[new.sequence_id] = Sequence.from_new_sequence(new, self.limits, self._grammars)
        except InvalidSequence as error:
            self._sequences.pop(new.sequence_id, None)
            self._failures[new.sequence_id] = str(error)

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
                sequence = self._find(item.sequence_id)
                start, samples = sequence.validate(item, self.limits)
                if self._swap_tracker.has_invalid_blocks:
                    self._swap_tracker.check_copied(sequence.blocks.values, item.new_block_ids)
            except InvalidSequence as error:
                failed[schedule_index] = self._fail(item.sequence_id, str(error))
                continue
            if item.num_cached_tokens is not None:
                sequence.num_cached_tokens = item.num_cached_tokens
            if item.new_block_ids:
                self._add_blocks(sequence, start, item.new_block_ids)
            tokens_left -= item.num_tokens
            admitted.add(item.sequence_id)
            runs.append(
                ScheduledRun(schedule_index, item.sequence_id, sequence, start, start + item.num_tokens, samples)
            )
        if self._drafting is not None:
            runs = self._draft(self._drafting, runs, scheduled, tokens_left)
        return runs, failed

    def _delay_unready(self, runs: list[ScheduledRun]) -> tuple[list[ScheduledRun], list[ScheduledRun]]:
        """The runs without the last token of each sequence whose grammar is not compiled, or whose mask takes long and
        is not made; and these runs as they were.

        Such a sequence samples nothing, and the next step computes that token again. So it delays itself alone.
        """
        waiting = [
            (run, run.sequence.matcher)
            for run in runs
            if run.samples and run.sequence.matcher is not None and not run.sequence.prepare_mask()
        ]
        if not waiting:
            return runs, []
        matchers = [matcher for _, matcher in waiting if matcher.starts_waiting() or len(waiting) == len(runs)]
        wait([matcher.awaited for matcher in matchers], _MAX_WAIT_SECONDS)
        delayed = [run for run, _ in waiting if not run.sequence.prepare_mask()]
        ids = {run.sequence_id for run in delayed}
        shortened = [run._replace(end=run.end - 1, samples=False) if run.sequence_id in ids else run for run in runs]
        return [run for run in shortened if run.end > run.start], delayed

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

    def _find(self, sequence_id: int) -> Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise InvalidSequence(self._failures.get(sequence_id, "not known"))
        return sequence

    def _fail(self, sequence_id: int, reason: str) -> SequenceResult:
        """Fails a sequence in this step and in all later ones, until it is finished."""
        if self._sequences.pop(sequence_id, None) is not None:
            self._failures[sequence_id] = reason
        return SequenceResult(sequence_id, [], failure=reason)

    def _fail_run(self, run: ScheduledRun, reason: str) -> None:
        # The sequence may have been finished since the launch, and its id reused.
        if self._sequences.get(run.sequence_id) is run.sequence:
            self._fail(run.sequence_id, reason)

    def _enqueue(self, runs: list[ScheduledRun], has_drafts: bool) -> SampleHandle:
        """Launches these runs. Their tokens are promised, unless some have drafts."""
        sequences = [run.sequence for run in runs if run.samples]
        drafts = [run.draft for run in runs if run.samples] if has_drafts else ()
        with self._failing_all(runs):
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

    def _apply_sample(self, run: ScheduledRun, token: int | None, logprobs: TokenLogprobs | None) -> SequenceResult:
        """A sequence's result, from the token that it was promised."""
        if token is None or run.sequence.failure is not None:
            return self._fail_without_token(run)
        run.sequence.fill_placeholder(run.end, token)
        return SequenceResult(run.sequence_id, [token], () if logprobs is None else (logprobs,))

    def _apply_verified(self, run: ScheduledRun, rows: list[tuple[int | None, TokenLogprobs | None]]) -> SequenceResult:
        """A sequence's result, from the tokens sampled after its last known token and after each draft token."""
        sequence = run.sequence
        if sequence.failure is not None:
            return self._fail_without_token(run)
        num_rows = num_accepted([token for token, _ in rows], run.draft)
        sampled = [(token, logprobs) for token, logprobs in rows[:num_rows] if token is not None]
        if not sampled and run.draft and self._drafting is not None:
            # A draft that overflows invalidates the rows before it too: the next step computes them without a draft.
            self._drafting.stop(sequence)
            sequence.num_computed = run.start
            return SequenceResult(run.sequence_id, [])
        if not sampled:
            return self._fail_without_token(run)
        tokens = [token for token, _ in sampled]
        sequence.extend(tokens)
        return SequenceResult(run.sequence_id, tokens, [logprobs for _, logprobs in sampled if logprobs is not None])

    def _fail_without_token(self, run: ScheduledRun) -> SequenceResult:
        """The result of a sequence that has failed, or fails because it has no token."""
        if run.sequence.failure == OUT_OF_MEMORY:
            return SequenceResult(
                run.sequence_id, [], failure=OUT_OF_MEMORY, failure_reason=FailureReason.OUT_OF_MEMORY
            )
        matcher = run.sequence.matcher
        in_grammar = None if matcher is None else matcher.failure
        if run.sequence.failure is None:
            run.sequence.failure = in_grammar.text if in_grammar is not None else _NO_TOKEN
            if in_grammar is None:  # its keys and values may not be finite either
                self.block_hashes.invalidate_written(run.sequence.blocks.values.tolist())
            self._fail_run(run, run.sequence.failure)
        reason = FailureReason.INTERNAL if in_grammar is None else in_grammar.reason
        return SequenceResult(run.sequence_id, [], failure=run.sequence.failure, failure_reason=reason)

    @contextmanager
    def _failing_all(self, runs: list[ScheduledRun]) -> Iterator[None]:
        """Fails all these sequences if the block raises: none of their states is known then."""
        try:
            yield
        except torch.AcceleratorError as error:
            # After a CUDA error, every call into its context fails.
            raise DeviceLost("the device failed in a step") from error
        except Exception:
            for run in runs:
                run.sequence.failure = run.sequence.failure or "the step failed"
                self._fail_run(run, run.sequence.failure)
            raise
