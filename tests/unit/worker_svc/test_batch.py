"""A step's sequences as flat arrays, compared with a layout token by token."""

import numpy as np
import pytest

from worker_svc.batch import SequenceChunk, make_batch

BLOCK = 4


def chunk(
    start: int,
    num_tokens: int,
    *,
    first_block: int = 0,
    num_cached_tokens: int | None = None,
    samples: bool = True,
    num_drafted: int = 0,
) -> SequenceChunk:
    """Distinct tokens, over a table with more blocks than the chunk needs."""
    tokens = np.arange(100 * start, 100 * start + num_tokens, dtype=np.int32)
    blocks = np.arange(first_block, first_block + 12, dtype=np.int32)
    num_cached_tokens = start if num_cached_tokens is None else num_cached_tokens
    return SequenceChunk(tokens, start, blocks, num_cached_tokens, samples, num_drafted)


STEPS = {
    "one decode": [chunk(7, 1)],
    "decodes": [chunk(0, 1), chunk(3, 1, first_block=40), chunk(4, 1, first_block=20), chunk(15, 1, first_block=60)],
    "a decode that stores nothing": [chunk(3, 1, num_cached_tokens=4), chunk(8, 1, first_block=20)],
    "a decode that does not draw": [chunk(3, 1, samples=False), chunk(8, 1, first_block=20)],
    "a prompt": [chunk(0, 17)],
    "the end of a prompt": [chunk(16, 15)],
    "a prompt behind a shared prefix": [chunk(5, 9, num_cached_tokens=8)],
    "decodes and prompts": [
        chunk(3, 1),
        chunk(16, 1, first_block=20),
        chunk(0, 16, first_block=40, samples=False),
        chunk(2, 7, first_block=60, num_cached_tokens=4),
    ],
    "a draft": [chunk(6, 4, num_drafted=3)],
    "drafts beside others": [
        chunk(3, 1),
        chunk(15, 3, first_block=20, num_drafted=2),
        chunk(0, 9, first_block=40, samples=False),
        chunk(2, 7, first_block=60, num_cached_tokens=4, num_drafted=1),
        chunk(0, 5, first_block=80),
    ],
}


@pytest.mark.parametrize("chunks", STEPS.values(), ids=STEPS.keys())
def test_every_token_has_the_position_and_slot_of_its_sequence(chunks: list[SequenceChunk]) -> None:
    batch = make_batch(chunks, BLOCK)
    tokens, positions, slots, first_rows = [], [], [], [0]
    logits_indices: list[int] = []
    for row, one in enumerate(chunks):
        for place, token in enumerate(one.token_ids.tolist(), one.start):
            tokens.append(token)
            positions.append(place)
            slots.append(
                int(one.blocks[place // BLOCK]) * BLOCK + place % BLOCK if place >= one.num_cached_tokens else -1
            )
        first_rows.append(len(tokens))
        if one.samples:
            logits_indices += range(len(tokens) - 1 - one.num_drafted, len(tokens))
        num_blocks = -(-(one.start + len(one.token_ids)) // BLOCK)
        assert batch.block_tables[row, :num_blocks].tolist() == one.blocks[:num_blocks].tolist()
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.logits_indices.tolist() == logits_indices
    assert batch.query_starts.tolist() == first_rows
    assert batch.context_lens.tolist() == [one.start + len(one.token_ids) for one in chunks]
    assert batch.max_query_len == max(len(one.token_ids) for one in chunks)
    for array in (batch.token_ids, batch.positions, batch.slots, batch.logits_indices):
        assert array.dtype == np.int64
    for table in (batch.block_tables, batch.query_starts, batch.context_lens):
        assert table.dtype == np.int32


def test_blocks_beyond_what_a_chunk_reaches_are_left_out() -> None:
    """They may be of a later step."""
    assert make_batch([chunk(3, 1), chunk(3, 2)], BLOCK).block_tables.tolist() == [[0, 0], [0, 1]]
