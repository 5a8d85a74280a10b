"""The sizes that forward passes are captured for as CUDA graphs. A batch is padded to the smallest that holds it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from worker_svc.batch import Batch
from worker_svc.gpu.inputs import count_single, decodes_only, padded

_DENSE, _SPACING = (1, 2, 4), 8
# Graphs of mixed steps: from 16 tokens on, doubled up to the spacing, and up to the most. A larger step computes for
# longer than its kernels take to launch one by one.
_LEAST_TOKENS, _TOKEN_SPACING, _MOST_TOKENS = 16, 64, 512
MAX_LONGER = 32
"""Sequences of several tokens in a graph of a mixed step, except for one of drafts."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The sizes of one graph.

    In a graph of decodes each sequence has one token, and a token is sampled after each. In one of a mixed step,
    `num_single` rows are for sequences of one token, `num_longer` for the others, and `num_rows` tokens are sampled.
    """

    num_tokens: int
    num_single: int
    num_longer: int
    num_rows: int

    @classmethod
    def of_decodes(cls, num_seqs: int) -> "GraphShape":
        return cls(num_seqs, num_seqs, 0, num_seqs)

    @classmethod
    def of_mixed(cls, num_tokens: int, max_sequences: int) -> "GraphShape":
        rows = min(num_tokens, max_sequences)
        # One more for the padding.
        return cls(num_tokens, rows, min(rows, MAX_LONGER) + 1, rows)

    @classmethod
    def of_drafts(cls, num_tokens: int, max_sequences: int, max_rows: int) -> "GraphShape":
        """Of a mixed step of any number of sequences of several tokens, with a token sampled after each of these."""
        num_seqs = min(num_tokens, max_sequences)
        return cls(num_tokens, num_seqs, min(num_tokens // 2, num_seqs) + 1, min(num_tokens, max_rows))

    @property
    def is_mixed(self) -> bool:
        return self.num_longer > 0

    @property
    def num_seqs(self) -> int:
        return self.num_single + self.num_longer

    def holds(self, batch: Batch) -> bool:
        """Whether the batch can be padded to this shape."""
        if not self.is_mixed:
            return decodes_only(batch) and len(batch.context_lens) <= self.num_single
        num_single = count_single(batch)
        return (
            len(batch.token_ids) <= self.num_tokens
            and num_single <= self.num_single
            and len(batch.context_lens) - num_single < self.num_longer
            and len(batch.logits_indices) <= self.num_rows
        )

    def rows_of(self, batch: Batch) -> tuple[int, slice]:
        """How many sequences of one token the batch begins with, and the rows of the others in the padded batch."""
        num_single = count_single(batch)
        num_longer = len(batch.context_lens) - num_single
        return num_single, slice(self.num_single, self.num_single + num_longer)

    def pad(self, batch: Batch) -> Batch:
        """The batch in this shape, with the block tables as they are.

        Tokens of padding are stored nowhere. Those of a mixed step are a sequence without context after the others:
        attention returns zeros for them. Rows of padding have no context, and in a mixed step no token either.
        """
        num_single, longer = self.rows_of(batch)
        context_lens = np.zeros(self.num_seqs, np.int32)
        context_lens[:num_single] = batch.context_lens[:num_single]
        context_lens[longer] = batch.context_lens[num_single:]
        return replace(
            batch,
            token_ids=padded(batch.token_ids, self.num_tokens, 0),
            positions=padded(batch.positions, self.num_tokens, 0),
            slots=padded(batch.slots, self.num_tokens, -1),
            query_starts=self._query_starts(batch, num_single, longer),
            context_lens=context_lens,
            max_query_len=self.num_tokens if self.is_mixed else 1,
            logits_indices=padded(batch.logits_indices, self.num_rows, 0),
        )

    def _query_starts(self, batch: Batch, num_single: int, longer: slice) -> NDArray[np.int32]:
        if not self.is_mixed:
            return np.arange(self.num_seqs + 1, dtype=np.int32)
        starts = np.full(self.num_seqs + 1, self.num_tokens, np.int32)
        starts[:num_single] = batch.query_starts[:num_single]
        starts[num_single : self.num_single] = num_single
        # The end of the last one too: there the padding begins.
        starts[longer.start : longer.stop + 1] = batch.query_starts[num_single:]
        return starts


def mixed_shapes(max_tokens: int, max_sequences: int) -> list[GraphShape]:
    """Of graphs of mixed steps, by ascending tokens."""
    return [GraphShape.of_mixed(size, max_sequences) for size in token_capture_sizes(max_tokens)]


def draft_shapes(max_tokens: int, max_sequences: int, max_rows: int) -> list[GraphShape]:
    """Of graphs for drafts of more sequences, or with more sampled tokens, than graphs of mixed steps have.

    Each row for a longer sequence is a program of each KV head in each layer, also if it has no sequence: the graphs of
    mixed steps have few.
    """
    return [
        GraphShape.of_drafts(size, max_sequences, max_rows)
        for size in token_capture_sizes(max_tokens)
        if size // 2 > MAX_LONGER or size > max_sequences
    ]


def max_padded_sequences(max_sequences: int, *, has_drafts: bool) -> int:
    """The most sequences of a graph, with its padding, where a step has so many at most."""
    longer = max(MAX_LONGER, _MOST_TOKENS // 2) if has_drafts else MAX_LONGER
    return max_sequences + min(max_sequences, longer) + 1


def capture_sizes(max_rows: int) -> list[int]:
    """The batch sizes that graphs are captured for, ascending: 1, 2, 4, 8, 16, 24 and so on, and the largest.

    A batch is padded to the next size: by less than 8 rows, which cost next to nothing when reading the weights
    dominates.
    """
    return _up_to(max_rows, [*_DENSE, *range(_SPACING, max_rows, _SPACING), max_rows])


def token_capture_sizes(max_tokens: int) -> list[int]:
    """The numbers of tokens that graphs of mixed steps are captured for, ascending: 16, 32, 64, 128, 192 and so on to
    512, or the largest step if that is smaller.

    A step is padded by less than 64 tokens, which cost little while reading the weights dominates, up to some hundreds
    of tokens. There are ten graphs at most.
    """
    most = min(max_tokens, _MOST_TOKENS)
    doubled = [_LEAST_TOKENS, 2 * _LEAST_TOKENS]
    return _up_to(most, [*doubled, *range(_TOKEN_SPACING, most, _TOKEN_SPACING), most])


def _up_to(most: int, sizes: Iterable[int]) -> list[int]:
    return sorted({size for size in sizes if size <= most})
