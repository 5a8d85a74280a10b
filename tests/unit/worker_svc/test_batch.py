"""A step's sequences as flat arrays, beside the same laid out token by token."""

import numpy as np
import pytest

from worker_svc.batch import Chunk, make_batch

BLOCK = 4


def chunk(
    start: int, num_tokens: int, *, first_block: int = 0, store_start: int | None = None, draws: bool = True
) -> Chunk:
    """Tokens that are told apart, over a table with more blocks than the chunk needs."""
    tokens = np.arange(100 * start, 100 * start + num_tokens, dtype=np.int32)
    blocks = np.arange(first_block, first_block + 12, dtype=np.int32)
    return Chunk(tokens, start, blocks, start if store_start is None else store_start, draws)


STEPS = {
    "one decode": [chunk(7, 1)],
    "decodes": [chunk(0, 1), chunk(3, 1, first_block=40), chunk(4, 1, first_block=20), chunk(15, 1, first_block=60)],
    "a decode that stores nothing": [chunk(3, 1, store_start=4), chunk(8, 1, first_block=20)],
    "a decode that does not draw": [chunk(3, 1, draws=False), chunk(8, 1, first_block=20)],
    "a prompt": [chunk(0, 17)],
    "the end of a prompt": [chunk(16, 15)],
    "a prompt behind a shared prefix": [chunk(5, 9, store_start=8)],
    "decodes and prompts": [
        chunk(3, 1),
        chunk(16, 1, first_block=20),
        chunk(0, 16, first_block=40, draws=False),
        chunk(2, 7, first_block=60, store_start=4),
    ],
}


@pytest.mark.parametrize("chunks", STEPS.values(), ids=STEPS.keys())
def test_every_token_stands_where_its_sequence_has_it(chunks: list[Chunk]) -> None:
    batch = make_batch(chunks, BLOCK)
    tokens, positions, slots, draw_rows, first_rows = [], [], [], [], [0]
    for row, one in enumerate(chunks):
        for place, token in enumerate(one.token_ids.tolist(), one.start):
            tokens.append(token)
            positions.append(place)
            slots.append(int(one.blocks[place // BLOCK]) * BLOCK + place % BLOCK if place >= one.store_start else -1)
        first_rows.append(len(tokens))
        if one.draws:
            draw_rows.append(len(tokens) - 1)
        num_blocks = -(-(one.start + len(one.token_ids)) // BLOCK)
        assert batch.block_tables[row, :num_blocks].tolist() == one.blocks[:num_blocks].tolist()
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.draw_rows.tolist() == draw_rows
    assert batch.query_starts.tolist() == first_rows
    assert batch.context_lens.tolist() == [one.start + len(one.token_ids) for one in chunks]
    assert batch.max_query_len == max(len(one.token_ids) for one in chunks)
    for array in (batch.token_ids, batch.positions, batch.slots, batch.draw_rows):
        assert array.dtype == np.int64
    for table in (batch.block_tables, batch.query_starts, batch.context_lens):
        assert table.dtype == np.int32


def test_blocks_beyond_what_a_chunk_reaches_are_left_out() -> None:
    """They may be of a later step."""
    assert make_batch([chunk(3, 1), chunk(3, 2)], BLOCK).block_tables.tolist() == [[0, 0], [0, 1]]
