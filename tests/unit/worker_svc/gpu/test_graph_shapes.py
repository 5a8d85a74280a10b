"""Graphs are captured for sizes that are close to each other, and a batch keeps its tokens when it is padded."""

import random
from dataclasses import replace

import numpy as np
import pytest

from worker_svc.batch import Batch, SequenceChunk, make_batch
from worker_svc.gpu.graph_shapes import (
    MAX_LONGER,
    GraphShape,
    capture_sizes,
    draft_shapes,
    max_padded_sequences,
    mixed_shapes,
    token_capture_sizes,
)
from worker_svc.gpu.inputs import empty_batch


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 9]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
        (37, [1, 2, 4, 8, 16, 24, 32, 37]),
    ],
)
def test_capture_sizes_end_with_the_largest_batch(max_rows: int, sizes: list[int]) -> None:
    assert capture_sizes(max_rows) == sizes


@pytest.mark.parametrize(
    ("max_tokens", "sizes"),
    [
        (1, [1]),
        (16, [16]),
        (100, [16, 32, 64, 100]),
        (512, [16, 32, 64, 128, 192, 256, 320, 384, 448, 512]),
        (8192, [16, 32, 64, 128, 192, 256, 320, 384, 448, 512]),
    ],
)
def test_there_are_at_most_ten_graphs_of_mixed_steps(max_tokens: int, sizes: list[int]) -> None:
    assert token_capture_sizes(max_tokens) == sizes


def _batch(lengths: list[int], samples: list[bool], seed: int = 0) -> Batch:
    chosen = random.Random(seed)
    chunks = []
    for place, (length, does_sample) in enumerate(zip(lengths, samples, strict=True)):
        start = chosen.randrange(40)
        tokens, blocks = np.arange(1, length + 1, dtype=np.int32), np.arange(20, dtype=np.int32) + 20 * place
        chunks.append(SequenceChunk(tokens, start, blocks, 0, does_sample))
    return make_batch(chunks, 16)


def _random_batch(chosen: random.Random) -> Batch:
    lengths = [1] * chosen.randrange(9) + [chosen.randint(2, 30) for _ in range(chosen.randrange(5))] or [1]
    return _batch(lengths, [chosen.random() < 0.7 for _ in lengths], chosen.randrange(1000))


def test_a_padded_batch_has_the_tokens_of_its_sequences_and_none_without_a_row() -> None:
    chosen, num_held = random.Random(3), 0
    for _ in range(500):
        batch = _random_batch(chosen)
        size, max_sequences = chosen.choice((16, 32, 64, 128)), chosen.choice((1, 4, 12))
        shape = GraphShape.of_mixed(size, max_sequences)
        if chosen.random() < 0.5:
            shape = GraphShape.of_drafts(size, max_sequences, 5 * max_sequences)
        if not shape.holds(batch):
            continue
        num_held += 1
        padded = shape.pad(batch)
        num_single, longer = shape.rows_of(batch)
        num_tokens, starts = len(batch.token_ids), padded.query_starts
        assert len(padded.token_ids) == starts[-1] == shape.num_tokens
        assert (np.diff(starts) >= 0).all()
        assert starts[0] == 0
        rows = [*range(num_single), *range(longer.start, longer.stop)]
        for row, begin, end, context in zip(
            rows, batch.query_starts, batch.query_starts[1:], batch.context_lens, strict=False
        ):
            assert (starts[row], starts[row + 1], padded.context_lens[row]) == (begin, end, context)
        others = np.setdiff1d(np.arange(shape.num_seqs), rows)
        assert not padded.context_lens[others].any()
        # Only the last tokens, which are stored nowhere, are of no sequence of the batch.
        lengths = np.diff(starts)[others]
        assert lengths.sum() == shape.num_tokens - num_tokens
        assert np.count_nonzero(lengths) <= 1
        assert (padded.slots[num_tokens:] == -1).all()
        assert padded.token_ids[:num_tokens].tolist() == batch.token_ids.tolist()
        assert padded.logits_indices[: len(batch.logits_indices)].tolist() == batch.logits_indices.tolist()
        assert len(padded.logits_indices) == shape.num_rows
    assert num_held > 150


def test_sizes_do_not_depend_on_the_batch() -> None:
    shape = GraphShape.of_mixed(64, 8)
    batches = [empty_batch(), _batch([1, 1, 17], [True, True, False]), _batch([40], [True])]
    padded = [shape.pad(batch) for batch in batches]
    for name in ("token_ids", "positions", "slots", "context_lens", "query_starts", "logits_indices"):
        assert len({(getattr(one, name).shape, getattr(one, name).dtype) for one in padded}) == 1, name
    assert {one.max_query_len for one in padded} == {64}


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "max_sequences"),
    [
        ([1, 16], 16, 8),  # tokens
        ([2] * (MAX_LONGER + 1), 512, 64),  # sequences of several tokens
        ([1, 1, 1, 5], 16, 2),  # sequences, and sampled rows
    ],
)
def test_a_batch_that_is_too_large_is_not_held(lengths: list[int], num_tokens: int, max_sequences: int) -> None:
    assert not GraphShape.of_mixed(num_tokens, max_sequences).holds(_batch(lengths, [True] * len(lengths)))


@pytest.mark.parametrize("max_sequences", [1, 8, 40, 256])
def test_a_graph_holds_drafts_of_all_sequences(max_sequences: int) -> None:
    """Of 512 tokens at most, sampled after each."""
    max_rows = 5 * max_sequences
    drafts, mixed = draft_shapes(2048, max_sequences, max_rows), mixed_shapes(2048, max_sequences)
    for num_longer in {1, min(MAX_LONGER, max_sequences), min(MAX_LONGER + 1, max_sequences), max_sequences}:
        for length in range(2, 6):
            lengths = [1] * (max_sequences - num_longer) + [length] * num_longer
            batch = _batch(lengths, [True] * len(lengths))
            # A draft is sampled after each token, which a prompt's tokens are not.
            batch = replace(batch, logits_indices=np.arange(sum(lengths)))
            fitting = [shape for shape in (*drafts, *mixed) if shape.holds(batch)]
            assert bool(fitting) == (sum(lengths) <= 512), lengths


def test_graphs_of_drafts_exist_where_those_of_mixed_steps_do_not_suffice() -> None:
    assert [shape.num_tokens for shape in draft_shapes(100, 256, 512)] == [100]
    assert [shape.num_tokens for shape in draft_shapes(100, 20, 100)] == [32, 64, 100]
    assert draft_shapes(64, 64, 64) == []


@pytest.mark.parametrize("max_sequences", [1, 8, 40, 256, 1000])
def test_no_graph_has_more_sequences_than_memory_is_allocated_for(max_sequences: int) -> None:
    mixed = mixed_shapes(4096, max_sequences)
    assert max(shape.num_seqs for shape in mixed) <= max_padded_sequences(max_sequences, has_drafts=False)
    drafts = draft_shapes(4096, max_sequences, 5 * max_sequences)
    assert max(shape.num_seqs for shape in drafts) <= max_padded_sequences(max_sequences, has_drafts=True)


def test_decodes_are_padded_to_rows_of_one_token() -> None:
    shape, batch = GraphShape.of_decodes(4), _batch([1, 1, 1], [True] * 3)
    assert shape.holds(batch)
    assert not shape.holds(_batch([1, 1, 1], [True, False, True]))
    assert not shape.holds(_batch([1] * 5, [True] * 5))
    padded = shape.pad(batch)
    assert padded.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert padded.context_lens.tolist() == [*batch.context_lens.tolist(), 0]
    assert padded.slots.tolist() == [*batch.slots.tolist(), -1]
