"""The sequences of a step as flat arrays: which tokens, where they stand, and where their keys and values go."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence.

    `token_ids` int32 [n, at least 1] stand at `start` and after; `blocks` int32 is the sequence's block table, which
    holds at least start + n tokens. Keys and values of tokens before `store_start` are in their blocks already.
    `draws` says whether the token after the last is to be drawn.
    """

    token_ids: NDArray[np.int32]
    start: int
    blocks: NDArray[np.int32]
    store_start: int
    draws: bool


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
    draw_rows: NDArray[np.int64]
    """[num_draws], places in token_ids after which a token is drawn."""


def make_batch(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """Lay out at least one chunk."""
    lengths = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    ends = lengths.cumsum()
    contexts = starts + lengths
    # A row's blocks beyond its context are left out: they may be of a later step.
    num_blocks = -(-contexts // block_size)
    block_tables = np.zeros((len(chunks), num_blocks.max()), np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, num_blocks.tolist(), strict=True)):
        block_tables[row, :count] = chunk.blocks[:count]
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    owners = np.repeat(np.arange(len(chunks)), lengths)
    pages, offsets = np.divmod(positions, block_size)
    slots = block_tables[owners, pages].astype(np.int64) * block_size + offsets
    slots[positions < np.repeat([chunk.store_start for chunk in chunks], lengths)] = -1
    draws = np.array([chunk.draws for chunk in chunks], bool)
    return Batch(
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64),
        positions=positions,
        slots=slots,
        block_tables=block_tables,
        query_starts=np.concatenate([[0], ends]).astype(np.int32),
        context_lens=contexts.astype(np.int32),
        max_query_len=int(lengths.max()),
        draw_rows=(ends - 1)[draws],
    )
