"""A step between its two halves: the sequences that run, and what must be waited for."""

from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from worker_svc.batch import SequenceChunk
from worker_svc.executor import SampleHandle
from worker_svc.sequences import Sequence
from worker_svc.step import ScheduledSequence, SequenceResult


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
    def is_decode(self) -> bool:
        """Whether it computes only the token that was sampled last."""
        return self.end - self.start == 1 and self.start >= self.sequence.prompt_length

    def chunk(self) -> SequenceChunk:
        """The tokens that it computes, with its draft."""
        sequence, start = self.sequence, self.start
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
