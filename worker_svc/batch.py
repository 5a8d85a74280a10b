"""The sequences of a step as flat arrays: which tokens, where they stand, and where their keys and values go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SequenceChunk(NamedTuple):
    """Consecutive tokens of one sequence.

    `token_ids` int32 [n, at least 1] stand at `start` and after; `blocks` int32 is the sequence's block table, which
    holds at least start + n tokens. Keys and values of tokens before `num_cached_tokens` are in their blocks already.
    `draws` says whether the token after the last is to be drawn.
    """

    token_ids: NDArray[np.int32]
    start: int
    blocks: NDArray[np.int32]
    num_cached_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's tokens, its sequences one after another."""

    token_ids: NDArray[np.int64]
    """[num_tokens]"""
    positions: NDArray[np.int64]
    """[num_tokens], place of each token in its sequence."""
    slots: NDArray[np.int64]
    """[num_tokens], block * block_size + offset in the block, where key and value of the token go; -1: nowhere."""
    block_tables: NDArray[np.int32]
    """[num_seqs, max_blocks]; what lies beyond a sequence's context means nothing."""
    query_starts: NDArray[np.int32]
    """[num_seqs + 1], where each sequence begins in token_ids, and at last num_tokens."""
    context_lens: NDArray[np.int32]
    """[num_seqs], tokens in the cache once those of this step are stored."""
    max_query_len: int
    logits_indices: NDArray[np.int64]
    """[num_draws], places in token_ids after which a token is drawn."""


def make_batch(chunks: Sequence[SequenceChunk], block_size: int) -> Batch:
    """Lay out at least one chunk."""
    # Between two forward passes every array is made of cold code: the fewer operations, the better.
    tokens, first_positions, tables, num_cached, samples = zip(*chunks, strict=True)
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
    return Batch(
        token_ids=np.concatenate(tokens, dtype=np.int64),
        positions=positions,
        slots=slots,
        block_tables=block_tables,
        query_starts=query_starts,
        context_lens=contexts.astype(np.int32),
        max_query_len=max(map(len, tokens)),
        logits_indices=logits_indices if all(samples) else logits_indices[np.array(samples, bool)],
    )
