"""Which program of a prefill computes which queries. Made for each step, on the host, for all layers.

Programs start in the order of their tiles. Tiles that see the most keys come first, so that no long one is left when
the others have ended.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels._attend import tile_queries
from quire_kernels._checks import check_index, require
from quire_kernels._shapes import next_power_of_2

Ints = NDArray[np.int32]

# The first query of a tile that has none.
_BEYOND = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """The tiles of a step on the device. A CUDA graph reads them again in each replay."""

    queries: int
    """Of a tile, as `queries_per_tile` says."""
    places: Tensor
    """int32 [tiles, 2]: a sequence and its first query in the tile, which may lie beyond its last one."""

    @classmethod
    def make(cls, query_starts: Ints, context_lens: Ints, num_tokens: int, queries: int, device: torch.device) -> Self:
        """Those of `plan_tiles`. Waits until they are on the device: for tests and benchmarks."""
        return cls(queries, torch.from_numpy(plan_tiles(query_starts, context_lens, num_tokens, queries)).to(device))


def queries_per_tile(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> int:
    """How many queries of a sequence a program computes, for all heads of a KV head's group."""
    group = num_heads // num_kv_heads
    return prefill_rows(group, head_dim, dtype, cache_dtype, device) // group


def prefill_rows(group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device) -> int:
    """TILE_M of a prefill: the pairs of a query and a head of its group that a program computes."""
    rows: int = max(tile_queries(head_dim, dtype, cache_dtype, device), next_power_of_2(group))
    return rows


def most_tiles(num_tokens: int, num_seqs: int, queries: int) -> int:
    """The most tiles of so many sequences that have so many tokens together."""
    return num_tokens // queries + num_seqs


def count_tiles(
    tiles: PrefillTiles | None, queries: int, num_tokens: int, num_seqs: int, key_cache: Tensor
) -> tuple[int, Tensor | None]:
    """How many programs compute tiles of so many queries, and where their places are; without `tiles` as many as could
    be needed. Raises ValueError if `tiles` are made for others, or are not on the device of `key_cache`.
    """
    if tiles is None:
        return most_tiles(num_tokens, num_seqs, queries), None
    num_tiles = len(tiles.places)
    require(tiles.queries == queries, "tiles", f"be made for tiles of {queries} queries")
    check_index(tiles.places, key_cache, (num_tiles, 2), torch.int32, "tiles.places")
    return num_tiles, tiles.places


def plan_tiles(query_starts: Ints, context_lens: Ints, num_tokens: int, queries: int) -> Ints:
    """The places of a step's tiles, int32 [tiles, 2], of which there are `most_tiles` of `num_tokens`.

    Args:
        query_starts: int32 [num_seqs + 1], as `paged_attention` takes them.
        context_lens: int32 [num_seqs].
        num_tokens: at least those of the sequences. The number of tiles depends on it and on the number of sequences
            alone, so that a graph can be replayed with other sequences.
        queries: of a tile.
    """
    num_seqs = len(context_lens)
    lengths = np.diff(query_starts).astype(np.int64)
    counts = -(-lengths // queries)
    sequences = np.repeat(np.arange(num_seqs), counts)
    first_queries = queries * (np.arange(len(sequences)) - np.repeat(counts.cumsum() - counts, counts))
    of_tile = lengths[sequences]
    num_keys = context_lens[sequences] - of_tile + np.minimum(first_queries + queries, of_tile)
    order = np.argsort(-num_keys, kind="stable")
    places = np.zeros((most_tiles(num_tokens, num_seqs, queries), 2), np.int32)
    places[:, 1] = _BEYOND
    places[: len(order), 0] = sequences[order]
    places[: len(order), 1] = first_queries[order]
    return places
