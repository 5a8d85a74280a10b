"""The sequences of a step as flat arrays: tokens, their positions, and the slots of their keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SequenceChunk(NamedTuple):
    """Consecutive tokens of one sequence.

    `token_ids` int32 [n, at least 1] are at the positions from `start` on. `blocks` int32 is the sequence's block table
    for at least start + n tokens. Keys and values of tokens before `num_cached_tokens` are in their blocks already.
    With `samples`, the token after the last one is sampled. The last `num_drafted` tokens are drafts: a token is then
    also sampled after each of them and after the token before them.
    """

    token_ids: NDArray[np.int32]
    start: int
    blocks: NDArray[np.int32]
    num_cached_tokens: int
    samples: bool
    num_drafted: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of a step, one sequence after another."""

    token_ids: NDArray[np.int64]
    """[num_tokens]"""
    positions: NDArray[np.int64]
    """[num_tokens], position of each token in its sequence."""
    slots: NDArray[np.int64]
    """[num_tokens], block * block_size + offset in the block, the slot of the token's key and value; -1: not stored."""
    block_tables: NDArray[np.int32]
    """[num_seqs, max_blocks]; what lies beyond a sequence's context means nothing."""
    query_starts: NDArray[np.int32]
    """[num_seqs + 1], where each sequence begins in token_ids, and at last num_tokens."""
    context_lens: NDArray[np.int32]
    """[num_seqs], tokens in the cache once those of this step are stored."""
    max_query_len: int
    logits_indices: NDArray[np.int64]
    """[num_rows], indices into token_ids of the tokens after which one is sampled; several per sequence with drafts."""
    sequence_ids: Sequence[int] = ()
    """Of its sequences; the newest has the highest one. Empty: not known."""
    needs_logits: NDArray[np.bool_] | None = None
    """[num_rows], rows of logits that are read; others may be undefined. None: all are read."""

    def rows_of(self, index: int) -> NDArray[np.bool_]:
        """[num_rows], whether a row of logits is of this sequence."""
        first, end = self.query_starts[index : index + 2].tolist()
        rows: NDArray[np.bool_] = (self.logits_indices >= first) & (self.logits_indices < end)
        return rows

    def without(self, index: int) -> "Batch":
        """The other sequences, of which there is at least one."""
        first, end = self.query_starts[index : index + 2].tolist()
        others = np.ones(len(self.token_ids), bool)
        others[first:end] = False
        logits_indices = self.logits_indices[~self.rows_of(index)]
        lengths = np.delete(np.diff(self.query_starts), index)
        query_starts = np.zeros(len(lengths) + 1, np.int32)
        query_starts[1:] = lengths.cumsum()
        return Batch(
            token_ids=self.token_ids[others],
            positions=self.positions[others],
            slots=self.slots[others],
            block_tables=np.delete(self.block_tables, index, 0),
            query_starts=query_starts,
            context_lens=np.delete(self.context_lens, index),
            max_query_len=int(lengths.max()),
            logits_indices=logits_indices - (end - first) * (logits_indices >= end),
            sequence_ids=[*self.sequence_ids[:index], *self.sequence_ids[index + 1 :]],
        )


def make_batch(chunks: Sequence[SequenceChunk], block_size: int, sequence_ids: Sequence[int] = ()) -> Batch:
    """Lays out at least one chunk. With `sequence_ids`, one for each, the newest can be left out if memory runs out."""
    # This runs between two forward passes, when its code is not in the CPU's caches: fewer operations are better.
    tokens, first_positions, tables, num_cached, samples, num_drafted = zip(*chunks, strict=True)
    lengths = np.fromiter(map(len, tokens), np.int64, len(chunks))
    starts = np.array(first_positions, np.int64)
    contexts, ends = starts + lengths, lengths.cumsum()
    # A row's blocks beyond its context are left out: they may be of a later step.
    num_blocks = (-(-contexts // block_size)).tolist()
    block_tables = np.zeros((len(chunks), max(num_blocks)), np.int32)
    for row, table, count in zip(block_tables, tables, num_blocks, strict=True):
        row[:count] = table[:count]
    sequence_indices, positions = np.arange(len(chunks)), starts
    if ends[-1] > len(chunks):
        sequence_indices = np.repeat(sequence_indices, lengths)
        positions = np.arange(ends[-1]) + (contexts - ends)[sequence_indices]
    blocks_in_table = positions // block_size
    slots = block_tables[sequence_indices, blocks_in_table] * np.int64(block_size) + (
        positions - blocks_in_table * block_size
    )
    if num_cached != first_positions:
        slots[positions < np.array(num_cached)[sequence_indices]] = -1
    query_starts = np.zeros(len(chunks) + 1, np.int32)
    query_starts[1:] = ends
    logits_indices = ends - 1
    if not all(samples):
        logits_indices = logits_indices[np.array(samples, bool)]
    if any(num_drafted):
        logits_indices = _with_rows_before(logits_indices, np.array(num_drafted)[np.array(samples, bool)])
    return Batch(
        token_ids=np.concatenate(tokens, dtype=np.int64),
        positions=positions,
        slots=slots,
        block_tables=block_tables,
        query_starts=query_starts,
        context_lens=contexts.astype(np.int32),
        max_query_len=max(map(len, tokens)),
        logits_indices=logits_indices,
        sequence_ids=sequence_ids,
    )


def lay_out_prompts(prompts: Sequence[Sequence[int]], block_size: int) -> Batch:
    """Whole prompts side by side, each in blocks of its own, from the first one on. No prompt is empty."""
    chunks, first = [], 0
    for prompt in prompts:
        stop = first - (-len(prompt) // block_size)
        blocks = np.arange(first, stop, dtype=np.int32)
        chunks.append(SequenceChunk(np.array(prompt, np.int32), 0, blocks, 0, samples=False))
        first = stop
    return make_batch(chunks, block_size)


def _with_rows_before(last_rows: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each row, preceded by as many rows as its count says."""
    num_rows = counts + 1
    ends = num_rows.cumsum()
    rows: NDArray[np.int64] = np.repeat(last_rows - ends + 1, num_rows) + np.arange(ends[-1])
    return rows
