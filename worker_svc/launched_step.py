"""A step between its two halves: the sequences that run, and what must be waited for."""

import math
import time
from collections.abc import Sequence as Items
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from worker_svc.batch import SequenceChunk, make_batch
from worker_svc.executor import SampleHandle
from worker_svc.prompt_logprobs import PromptPiece
from worker_svc.sampler import SamplerOutput
from worker_svc.sequences import Sequence
from worker_svc.step import ScheduledSequence, SequenceResult, StepOutcome, SwapResult, TokenLogprobs


class ScheduledRun(NamedTuple):
    """A scheduled sequence that runs: its index in the step, and the positions `start` to `end` - 1 that it computes.

    If it `samples`, the token is at position `end`. Its draft is computed at `end` and after.
    """

    schedule_index: int
    sequence_id: int
    sequence: Sequence
    start: int
    end: int
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def scored_end(self) -> int:
        """The tokens after positions `start` to this less 1 are of the prompt and get log-probabilities."""
        if self.sequence.num_top_of_prompt is None:
            return self.start
        return max(self.start, min(self.end, self.sequence.prompt_length - 1))

    @property
    def chunk_start(self) -> int:
        """The first position of `chunk`, behind the tokens that `prompt_pieces` computes. At least the last token is
        left to it.
        """
        # Of one token, as of a decode, there is no other position: hundreds in each step.
        return self.start if self.end - self.start == 1 else min(self.scored_end, self.end - 1)

    def prompt_pieces(self, num_rows: int, block_size: int) -> list[PromptPiece]:
        """The computation of the tokens before `scored_end`, at most `num_rows` of them at a time."""
        num_top, pieces = self.sequence.num_top_of_prompt, []
        tokens, blocks = self.sequence.tokens.values, self.sequence.blocks.values
        for start in range(self.start, self.scored_end, num_rows):
            end = min(start + num_rows, self.scored_end)
            stored = max(self.sequence.num_cached_tokens, start)
            # With rows of logits as after drafts: one for each token.
            chunk = SequenceChunk(tokens[start:end], start, blocks, stored, True, end - start - 1)
            next_tokens = tokens[start + 1 : end + 1].astype(np.int64)
            batch = make_batch([chunk], block_size, [self.sequence_id])
            pieces.append(PromptPiece(batch, next_tokens, num_top or 0))
        return pieces

    @property
    def is_decode(self) -> bool:
        """Whether it computes only the token that was sampled last."""
        return self.end - self.start == 1 and self.start >= self.sequence.prompt_length

    def chunk(self) -> SequenceChunk:
        """The tokens that it computes and that are not in `prompt_pieces`, with its draft."""
        sequence, start = self.sequence, self.chunk_start
        tokens, blocks, stored = sequence.tokens.values, sequence.blocks.values, sequence.num_cached_tokens
        tokens, stored = tokens[start : self.end], stored if stored > start else start
        if not self.draft:
            return SequenceChunk(tokens, start, blocks, stored, self.samples)
        tokens = np.concatenate((tokens, np.array(self.draft, np.int32)))
        return SequenceChunk(tokens, start, blocks, stored, self.samples, len(self.draft))


@dataclass(slots=True)
class LaunchedStep:
    """A launched step, to be passed to `Runner.finish`."""

    step_id: int
    scheduled: list[ScheduledSequence]
    results: dict[int, SequenceResult]
    """By index in the schedule: of sequences that do not run, and, once applied, of those that sample."""
    runs: list[ScheduledRun]
    has_drafts: bool
    sample_handle: SampleHandle | None
    pending_copies: "list[Future[Any]]"
    """Swaps and copies that must be done before it is."""
    started: float
    is_applied: bool = False
    """Whether the sampled tokens are applied to the sequences."""
    num_left_out: int = 0
    """Sequences that fail in it because memory ran out; known once it is applied."""

    def prompt_logprobs(
        self, output: SamplerOutput, num_rows: int
    ) -> tuple[dict[int, Items[TokenLogprobs]], list[ScheduledRun]]:
        """The log-probabilities of prompts, by index in the schedule; and the runs in which one is not a number.

        Each piece has at most `num_rows` of them.
        """
        found: dict[int, Items[TokenLogprobs]] = {}
        failed: list[ScheduledRun] = []
        pieces = iter(output.prompt_logprobs)
        for run in self.runs if output.prompt_logprobs else ():
            if num_scored := run.scored_end - run.start:
                scored = list(chain.from_iterable(islice(pieces, -(-num_scored // num_rows))))
                found[run.schedule_index] = scored
                if not all(math.isfinite(one.logprob) for one in scored):
                    failed.append(run)
        return found, failed

    def add_prompt_logprobs(self, found: dict[int, Items[TokenLogprobs]]) -> None:
        """Adds what `prompt_logprobs` has found to the results of sequences that have not failed."""
        for schedule_index, logprobs in found.items():
            result = self._result(schedule_index)
            if result.failure is None:
                self.results[schedule_index] = result._replace(prompt_logprobs=logprobs)

    def outcome(self, swap_results: list[SwapResult], swap_stall_seconds: float) -> StepOutcome:
        """The outcome of the step, once it is applied."""
        num_tokens = sum(run.end - run.start for run in self.runs)
        num_decodes = sum(run.is_decode for run in self.runs)
        drafted = [run for run in self.runs if run.draft] if self.has_drafts else []
        return StepOutcome(
            [self._result(schedule_index) for schedule_index in range(len(self.scheduled))],
            time.perf_counter() - self.started,
            num_tokens - num_decodes,
            num_decodes,
            swap_results,
            swap_stall_seconds,
            draft_tokens=sum(len(run.draft) for run in drafted),
            accepted_tokens=sum(max(0, len(self.results[run.schedule_index].token_ids) - 1) for run in drafted),
            num_left_out=self.num_left_out,
        )

    def _result(self, schedule_index: int) -> SequenceResult:
        """The result of a sequence; it is empty where the sequence samples nothing."""
        if schedule_index in self.results:
            return self.results[schedule_index]
        return SequenceResult(self.scheduled[schedule_index].sequence_id, [])

    def is_done(self) -> bool:
        """Whether finishing it would not wait."""
        return (self.sample_handle is None or self.sample_handle.is_done()) and all(
            future.done() for future in self.pending_copies
        )

    def wait(self) -> None:
        """Returns when it is done; any thread may call it."""
        if self.sample_handle is not None:
            self.sample_handle.wait()
        if self.pending_copies:
            wait(self.pending_copies)
