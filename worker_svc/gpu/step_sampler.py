"""How a step's rows sample on the device: by graphs where they can, and by two kernels where all rows are greedy."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire_kernels.mask_logits import mask_logits
from quire_kernels.sample_greedy import sample_greedy
from worker_svc.description import WorkerLimits
from worker_svc.gpu.graph_shapes import capture_sizes
from worker_svc.gpu.graphs import Work
from worker_svc.gpu.inputs import padded
from worker_svc.gpu.penalty_slots import PenaltySlots
from worker_svc.gpu.sampling import (
    Arrays,
    DeviceMasks,
    LogitEntryLists,
    adjust_and_sample,
    bad_word_columns,
    sampling_columns,
    sampling_inputs,
)
from worker_svc.gpu.staging import ALIGNMENT, Staging, StagingBuffer
from worker_svc.out_of_memory import Drafts
from worker_svc.sequences import Sequence

# Staged entries of bias and suppressed tokens, of all rows. A step with more of them samples without a graph.
_MAX_STAGED_ENTRIES = 1024
# Bytes of staged inputs: per row, per entry; and arrays padded for alignment.
_ROW_BYTES, _ENTRY_BYTES, _NUM_ARRAYS = 64, 12, 16

SampleRows: TypeAlias = Callable[[DeviceMasks | None], None]
"""Enqueues the sampling of a step: to be called after its forward pass, with the masks of grammars if it has any."""


@dataclass(frozen=True, slots=True)
class RowsToSample:
    """The rows of a step: each has a sequence, and the position of the token that is sampled."""

    sequences: Items[Sequence]
    positions: Items[int]
    whole: Items[Sequence]
    """The sequences once each; drafts are of these."""
    drafts: Drafts

    @classmethod
    def of(cls, whole: Items[Sequence], drafts: Drafts) -> Self:
        positions = [len(sequence.tokens) for sequence in whole]
        if not drafts:
            return cls(whole, positions, whole, drafts)
        lengths = [1 + len(draft) for draft in drafts]
        positions = [first + row for first, length in zip(positions, lengths, strict=True) for row in range(length)]
        return cls(
            [s for s, length in zip(whole, lengths, strict=True) for _ in range(length)], positions, whole, drafts
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def is_constrained(self) -> bool:
        """Whether a row has a grammar."""
        return any(sequence.matcher is not None for sequence in self.whole)


class StepSampler:
    """Samples the rows of `logits` into `sampled`. Inputs are staged from byte 0 on, and take at most `num_bytes`.

    Three ways, from the fewest launches to the most: greedy rows; graphs by the number of rows; kernel by kernel.
    """

    def __init__(
        self,
        limits: WorkerLimits,
        device: torch.device,
        staging: Staging,
        logits: Tensor,
        sampled: Tensor,
        *,
        deterministic: bool = False,
    ) -> None:
        """With `deterministic` a row's token does not depend on the other rows, to the last bit."""
        self._staging, self._logits, self._sampled = staging, logits, sampled
        self._deterministic = deterministic
        self._sizes = capture_sizes(limits.max_sequences)
        self._graphs: dict[int, Work] = {}
        self._greedy_graphs: dict[int, Work] = {}
        self._penalty_slots = PenaltySlots(limits.max_sequences, limits.vocab_size, device, staging.upload)
        self._entry_lists = LogitEntryLists()
        # Compiled now. It changes nothing: every token is allowed.
        every = np.full((1, -(-limits.vocab_size // 32)), -1, np.int32)
        mask_logits(logits, staging.upload(np.zeros(1, np.int64)), staging.upload(every))
        for num_rows in {1, len(sampled)}:
            sample_greedy(logits[:num_rows], sampled[:num_rows])

    @staticmethod
    def num_bytes(limits: WorkerLimits) -> int:
        """The most bytes of staged inputs, a multiple of ALIGNMENT."""
        size = limits.max_sampled_rows * _ROW_BYTES + _MAX_STAGED_ENTRIES * _ENTRY_BYTES + _NUM_ARRAYS * ALIGNMENT
        return -(-size // ALIGNMENT) * ALIGNMENT

    @property
    def capture_sizes(self) -> list[int]:
        """The numbers of rows that there are graphs for, the largest first: its memory serves the others."""
        return self._sizes[::-1]

    def capture(self, sizes: Items[int], capture: Callable[[Work], Work]) -> Iterator[None]:
        """Captures the graphs of each size; yields after each. They read the addresses that `prepare` fills."""
        for size in sizes:
            self._greedy_graphs[size] = capture(partial(self._take_largest, size))
            columns = sampling_columns([], [], np.empty(0, np.int64), size)
            with self._staging.next_buffer() as buffer:
                sample = self._stage(buffer, columns, _pad_entries(self._entry_lists.of([], [])), size)
            self._graphs[size] = capture(partial(sample, None))
            yield

    def forget(self) -> None:
        """Drops all graphs."""
        self._graphs.clear()
        self._greedy_graphs.clear()

    def prepare(self, buffer: StagingBuffer, rows: RowsToSample) -> SampleRows:
        """Stages how the rows sample."""
        if not len(rows):
            return lambda masks: None
        sequences = rows.sequences
        place = bisect_left(self._sizes, len(rows))
        size = self._sizes[place] if place < len(self._sizes) else len(rows)
        entries = self._entry_lists.of(sequences, rows.positions)
        if not len(entries[0]) and all(sequence.takes_argmax for sequence in rows.whole):
            greedy = self._greedy_graphs.get(size) or partial(self._take_largest, len(rows))
            return lambda masks: greedy()
        entries = _pad_entries(entries)
        slots = self._penalty_slots.of(sequences)
        filtered = [(row, sequence.params) for row, sequence in enumerate(sequences) if sequence.has_filters]
        bad_words = bad_word_columns(rows.whole, rows.drafts)
        # Masks, logit filters and bad words are not part of a graph: their number differs.
        captured = None
        if len(entries[0]) == _MAX_STAGED_ENTRIES and not filtered and bad_words is None and not rows.is_constrained:
            captured = self._graphs.get(size)
        if captured is not None:
            self._staging.send(buffer, [sampling_columns(sequences, rows.positions, slots, size), entries])
            return lambda masks: captured()
        columns = sampling_columns(sequences, rows.positions, slots, len(rows))
        suppress = None if bad_words is None else bad_words.on_device(self._staging.upload)
        return partial(self._stage(buffer, columns, entries, len(rows)), filtered=filtered, bad_words=suppress)

    def _stage(self, buffer: StagingBuffer, columns: Arrays, entries: Arrays, num_rows: int) -> Callable[..., None]:
        """Stages the inputs of so many rows, and returns what samples them: a function of the masks."""
        if len(entries[0]) == _MAX_STAGED_ENTRIES:
            staged, changes = self._staging.send(buffer, [columns, entries])
        else:
            (staged,) = self._staging.send(buffer, [columns])
            changes = [self._staging.upload(column) for column in entries]
        inputs = sampling_inputs(staged, changes, self._penalty_slots.token_counts)

        def sample(masks: DeviceMasks | None, **options: object) -> None:
            adjust_and_sample(
                self._logits[:num_rows],
                inputs,
                self._sampled,
                masks=masks,
                deterministic=self._deterministic,
                **options,  # type: ignore[arg-type]
            )

        return sample

    def _take_largest(self, num_rows: int) -> None:
        sample_greedy(self._logits[:num_rows], self._sampled[:num_rows])


def _pad_entries(entries: Arrays) -> Arrays:
    """Columns of `LogitEntries`, padded to a multiple of _MAX_STAGED_ENTRIES and at least to that.

    Kernels are compiled again for some lengths, which must not happen while serving.
    """
    length = max(1, -(-len(entries[0]) // _MAX_STAGED_ENTRIES)) * _MAX_STAGED_ENTRIES
    return [padded(column, length, fill) for column, fill in zip(entries, (-1, 0, 0), strict=True)]
