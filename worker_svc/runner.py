"""Runs steps: one forward pass over all tokens of a step, then one draw for each sequence that is due one."""

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from worker_svc.batch import Chunk, make_batch
from worker_svc.errors import DeviceLost
from worker_svc.forward import Forward
from worker_svc.identity import Limits
from worker_svc.sampler import draw_tokens
from worker_svc.sequences import Refused, Sequence
from worker_svc.step import NewSequence, ScheduledSequence, SequenceResult, Step, StepOutcome


@dataclass(frozen=True, slots=True)
class _Run:
    """A scheduled sequence that runs, and its place in the step."""

    place: int
    scheduled: ScheduledSequence
    sequence: Sequence
    draws: bool

    @property
    def decodes(self) -> bool:
        """Whether it computes the token drawn last, and no more."""
        return self.scheduled.num_tokens == 1 and self.scheduled.start >= self.sequence.prompt_length

    def chunk(self) -> Chunk:
        start, store_start = self.scheduled.start, self.scheduled.store_start
        return Chunk(
            token_ids=self.sequence.tokens.values[start : start + self.scheduled.num_tokens],
            start=start,
            blocks=self.sequence.blocks.values,
            store_start=start if store_start is None else store_start,
            draws=self.draws,
        )


class Runner:
    """A model, its paged cache, and the sequences that it knows. To be used by one thread.

    What is wrong with one sequence is that sequence's failure; the others run. A sequence that failed fails in every
    later step too, since steps already on their way build on what was not computed.
    """

    def __init__(self, forward: Forward, limits: Limits) -> None:
        self.limits = limits
        self._forward = forward
        self._sequences: dict[int, Sequence] = {}
        self._failures: dict[int, str] = {}

    def reset(self) -> None:
        """Forget all sequences."""
        self._sequences.clear()
        self._failures.clear()

    @torch.inference_mode()
    def step(self, step: Step) -> StepOutcome:
        """Run one step. It raises only for a fault of ours or of the device; then every sequence in it has failed."""
        started = time.perf_counter()
        for sequence_id in step.finished_ids:
            self._sequences.pop(sequence_id, None)
            self._failures.pop(sequence_id, None)
        for new in step.new_sequences:
            self._learn(new)
        results = [SequenceResult(scheduled.sequence_id, []) for scheduled in step.scheduled]
        runs = self._admit(step.scheduled, results)
        if runs:
            try:
                self._run(runs, results)
            except torch.AcceleratorError as error:
                # After an error of its own a CUDA context fails whatever it is asked.
                raise DeviceLost("the device failed in a step") from error
            except Exception:
                for run in runs:
                    self._fail(run.scheduled.sequence_id, "the step failed")
                raise
        num_tokens = sum(run.scheduled.num_tokens for run in runs)
        num_decodes = sum(run.decodes for run in runs)
        return StepOutcome(results, time.perf_counter() - started, num_tokens - num_decodes, num_decodes)

    def _learn(self, new: NewSequence) -> None:
        try:
            if new.sequence_id in self._sequences or new.sequence_id in self._failures:
                raise Refused("its id was used before")
            self._sequences[new.sequence_id] = Sequence.learn(new, self.limits)
        except Refused as refusal:
            self._sequences.pop(new.sequence_id, None)
            self._failures[new.sequence_id] = str(refusal)

    def _admit(self, scheduled: Items[ScheduledSequence], results: list[SequenceResult]) -> list[_Run]:
        """What of the step can run, with its blocks taken over. The rest fails, in `results`."""
        runs: list[_Run] = []
        admitted: set[int] = set()
        tokens_left = self.limits.max_step_tokens
        for place, item in enumerate(scheduled):
            try:
                if item.sequence_id in admitted:
                    raise Refused("scheduled twice in one step")
                if len(runs) == self.limits.max_sequences or item.num_tokens > tokens_left:
                    raise Refused("the step is larger than this worker's budget")
                sequence = self._find(item.sequence_id)
                sequence.check(item, self.limits)
            except Refused as refusal:
                results[place] = self._fail(item.sequence_id, str(refusal))
                continue
            sequence.blocks.extend(item.new_block_ids)
            tokens_left -= item.num_tokens
            admitted.add(item.sequence_id)
            runs.append(_Run(place, item, sequence, sequence.draws(item)))
        return runs

    def _find(self, sequence_id: int) -> Sequence:
        if sequence_id in self._failures:
            raise Refused(self._failures[sequence_id])
        if sequence_id not in self._sequences:
            raise Refused("not known")
        return self._sequences[sequence_id]

    def _fail(self, sequence_id: int, why: str) -> SequenceResult:
        """The failure of a sequence, which holds until it is finished."""
        if self._sequences.pop(sequence_id, None) is not None:
            self._failures[sequence_id] = why
        return SequenceResult(sequence_id, [], failure=why)

    def _run(self, runs: list[_Run], results: list[SequenceResult]) -> None:
        """Compute and draw, and take over what came of it."""
        logits = self._forward(make_batch([run.chunk() for run in runs], self.limits.block_size))
        for run in runs:
            run.sequence.num_computed = run.scheduled.start + run.scheduled.num_tokens
        drawing = [run for run in runs if run.draws]
        if not drawing:
            return
        draws = draw_tokens(logits, [run.sequence.sampling for run in drawing])
        for run, token, told in zip(drawing, draws.tokens, draws.logprobs, strict=True):
            sequence_id = run.scheduled.sequence_id
            if token is None:
                results[run.place] = self._fail(
                    sequence_id, "there is no token to draw: the logits are not numbers, or all are suppressed"
                )
                continue
            run.sequence.add(token)
            results[run.place] = SequenceResult(sequence_id, [token], [] if told is None else [told])
