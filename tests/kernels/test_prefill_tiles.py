"""Each query is in one tile, those that see the most keys come first, and results are those without a plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire_kernels.paged_attention import paged_attention
from quire_kernels.prefill_tiles import PrefillTiles, most_tiles, plan_tiles, queries_per_tile


def test_each_query_is_in_one_tile_and_the_longest_work_comes_first() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        queries, num_seqs = int(rng.integers(1, 40)), int(rng.integers(1, 12))
        lengths = rng.integers(0, 90, num_seqs)
        contexts = (lengths + rng.integers(0, 500, num_seqs)).astype(np.int32)
        begin, beyond = int(rng.integers(0, 9)), int(rng.integers(0, 50))
        starts = (begin + np.concatenate([[0], lengths.cumsum()])).astype(np.int32)
        num_tokens = int(starts[-1]) + beyond
        places = plan_tiles(starts, contexts, num_tokens, queries)
        assert places.shape == (most_tiles(num_tokens, num_seqs, queries), 2)
        assert places.dtype == np.int32
        computed, keys = [], []
        for sequence, first in places.tolist():
            end = min(first + queries, int(lengths[sequence]))
            computed += [(sequence, query) for query in range(first, end)]
            if first < end:
                keys.append(int(contexts[sequence] - lengths[sequence]) + end)
        assert sorted(computed) == [(row, query) for row in range(num_seqs) for query in range(lengths[row])]
        assert len(set(computed)) == len(computed)
        assert keys == sorted(keys, reverse=True)
        # Tiles without a query are the last ones.
        assert all(first < lengths[sequence] for sequence, first in places[: len(keys)].tolist())


def test_sequences_without_context_and_queries_have_tiles_too() -> None:
    """As those that pad a graph: their output must be finite."""
    places = plan_tiles(np.array([0, 0, 3], np.int32), np.array([0, 0], np.int32), 3, 2)
    assert places[:2].tolist() == [[1, 2], [1, 0]] or places[:2].tolist() == [[1, 0], [1, 2]]


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_dtype": torch.int8, "window": 20}, {"dtype": torch.float32}],
    ids=["float16", "int8 and a window", "float32"],
)
def test_results_are_those_without_a_plan(make_batch: Callable[..., Any], options: dict[str, Any]) -> None:
    sequences = [(1, 9), (40, 40), (0, 7), (3, 150), (70, 90)]
    batch = make_batch(sequences, (1, 4), **{"dtype": torch.float16, **options})
    assert torch.equal(paged_attention(**batch.tiled_arguments()), paged_attention(**batch.arguments()))


def test_sequences_of_one_query_have_the_tiles_of_longer_ones(make_batch: Callable[..., Any]) -> None:
    batch = make_batch([(1, 9), (1, 40)], (1, 2), dtype=torch.float16)
    assert batch.max_query_len == 1
    output = paged_attention(**batch.tiled_arguments())
    assert torch.equal(output, paged_attention(**batch.arguments() | {"max_query_len": 2}))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("tiles", lambda tiles: replace(tiles, queries=tiles.queries + 1)),
        ("tiles.places", lambda tiles: replace(tiles, places=tiles.places[:, :1])),
        ("tiles.places", lambda tiles: replace(tiles, places=tiles.places.long())),
    ],
)
def test_a_wrong_argument_is_named(
    make_batch: Callable[..., Any], argument: str, change: Callable[[PrefillTiles], PrefillTiles]
) -> None:
    arguments = make_batch([(3, 9)]).tiled_arguments()
    arguments["tiles"] = change(arguments["tiles"])
    with pytest.raises(ValueError, match=f"^{argument}: "):
        paged_attention(**arguments)


def test_a_group_of_many_heads_has_one_query_in_a_tile() -> None:
    device = torch.device("cpu")
    assert queries_per_tile(32, 8, 128, torch.bfloat16, torch.bfloat16, device) == 32
    assert queries_per_tile(71, 1, 64, torch.float32, torch.float32, device) == 1
