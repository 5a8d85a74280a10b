"""The layout of a step's attention for the CPU: which queries and pages go into one call of torch.

Runs of queries, and decodes of few keys, become tiles padded to one shape. Decodes of many keys are cut into chunks of
equal size: contexts of 16 and of 1,100 tokens share a batch without padding each other. Under a sliding window the
pages that no query of a run sees are left out first; the rest counts as the run's context.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels._checks import require

Ints = NDArray[np.int64]

# The constants were chosen on 2 cores of an AMD EPYC (Zen 5, AVX-512 with bf16), torch 2.13, 3 KV heads of 64, bfloat16
# and float32, by the time of a layer over a cache of 30 layers, so that pages come from memory.
# Fused attention is as fast per query from 64 queries up; tiles skip what causality hides beyond their last query.
TILE_QUERIES = 128
# The cost of one more call, in query-key pairs of padding.
CALL_PAIRS = 4096
# Up to this number of keys, padding included, one fused call is faster than chunks that must be merged.
FUSED_DECODE_KEYS = 4096
# 64 and 128 are equally fast, 32 and 256 about 10 % slower.
CHUNK_KEYS = 64
# Keys gathered at once. 2,048 take up to 40 % longer (more calls), all 32,000 of a batch 30 % (out of the caches).
SLAB_KEYS = 8192


@dataclass(frozen=True, eq=False)
class GatheredPages:
    """The same number of pages for each of several contexts, padded with another page of the context."""

    blocks: Tensor  # int64 [num_contexts, num_pages]
    unused: tuple[Tensor, Tensor]  # (context, key) pairs of padding
    memo: dict[Hashable, Tensor] = field(default_factory=dict)  # derived from it and from the cache's shape


@dataclass(frozen=True, eq=False)
class Tiles:
    """Runs of queries, padded to one number of queries and one number of keys."""

    read: Tensor | None  # int64 [num_tiles * num_queries], tokens; padding repeats a tile's last one; None: all tokens
    real: Tensor | None  # int64, which of those are not padding; None: all
    tokens: Tensor  # int64, the tokens that are left
    hidden: Tensor | None  # bool [num_tiles, 1, num_queries, num_keys], what a query must not see; None: nothing
    num_queries: int
    num_keys: int
    pages: GatheredPages


@dataclass(frozen=True, eq=False)
class Slab:
    """Consecutive chunks of one call."""

    chunks: slice
    tokens: Tensor  # int64 [num_chunks], whose context the chunk is a part of
    hidden: Tensor  # bool [num_chunks, 1, num_keys], keys beyond the context or before the window
    pages: GatheredPages


@dataclass(frozen=True, eq=False)
class Chunks:
    """Contexts of one query each, cut into chunks of equal size."""

    tokens: Tensor  # int64 [num_contexts]
    context: Tensor  # int64 [num_chunks]
    number: Tensor  # int64 [num_chunks], the chunk's place in its context
    max_chunks: int  # of a context
    slabs: tuple[Slab, ...]


@dataclass(frozen=True, eq=False)
class CpuAttentionPlan:
    """A step's layout, for all layers of one window: made by `plan_cpu_attention`, used by `cpu_paged_attention`."""

    num_tokens: int
    block_size: int
    parts: tuple[Tiles | Chunks, ...]  # that hold each token once; a single part holds them in order


@dataclass(frozen=True)
class _Runs:
    """Runs of queries at the end of their contexts: each one's row of the block table, first token, and lengths."""

    tables: Ints
    starts: Ints
    queries: Ints
    keys: Ints

    def __getitem__(self, which: NDArray[Any]) -> "_Runs":
        return _Runs(self.tables[which], self.starts[which], self.queries[which], self.keys[which])


def plan_cpu_attention(
    block_tables: Any, query_starts: Any, context_lens: Any, block_size: int, *, window: int | None = None
) -> CpuAttentionPlan:
    """Lays out a step's attention, once for all layers of one window.

    Args:
        block_tables: integer [num_seqs, max_blocks], a CPU tensor or an array as the two below; entries beyond a
            sequence's context may hold anything.
        query_starts: integer [num_seqs + 1], where each sequence begins among the tokens, and at last num_tokens.
        context_lens: integer [num_seqs], tokens in the cache, those of this step included.
        block_size: tokens in a block.
        window: how many keys a query sees at most, its own included; None: all.

    Raises:
        ValueError: an argument, named, has a wrong shape, or invalid values: starts that decrease, contexts
            shorter than their queries or longer than their row of the block table.
    """
    tables = np.asarray(block_tables).astype(np.int64)
    starts = np.asarray(query_starts).astype(np.int64)
    contexts = np.asarray(context_lens).astype(np.int64)
    require(window is None or window >= 1, "window", "be at least 1")
    require(tables.ndim == 2, "block_tables", "be [num_seqs, max_blocks]")
    require(starts.shape == (len(tables) + 1,), "query_starts", "be [num_seqs + 1]")
    require(contexts.shape == (len(tables),), "context_lens", "be [num_seqs]")
    queries = np.diff(starts)
    require(bool((queries >= 0).all()), "query_starts", "not decrease")
    require(bool((contexts >= queries).all()), "context_lens", "include the queries of this step")
    require(bool((contexts <= tables.shape[1] * block_size).all()), "context_lens", "fit the rows of block_tables")

    num_tokens = int(starts[-1])
    sequences = _skip_unseen(_Runs(tables, starts[:-1], queries, contexts), window, block_size)
    decoding = queries == 1
    chunked = decoding & (decoding.sum() * sequences.keys[decoding].max(initial=0) > FUSED_DECODE_KEYS)
    tiles = _skip_unseen(_cut_into_tiles(sequences[~chunked]), window, block_size)
    parts: list[Tiles | Chunks] = [
        _plan_tiles(tiles[batch], num_tokens, window, block_size) for batch in _batches(tiles)
    ]
    if chunked.any():
        parts.append(_plan_chunks(sequences[chunked], window, block_size))
    return CpuAttentionPlan(num_tokens, block_size, tuple(parts))


def _skip_unseen(runs: _Runs, window: int | None, block_size: int) -> _Runs:
    """The same runs without the pages before the window of their first query."""
    if window is None:
        return runs
    skipped = _first_seen(runs, window) // block_size
    if not skipped.any():
        return runs
    keys = runs.keys - skipped * block_size
    # [num_runs, pages of the longest rest]; what is beyond a row's end is beyond its context
    page = np.minimum(skipped[:, None] + np.arange(-(-keys.max() // block_size)), runs.tables.shape[1] - 1)
    return _Runs(np.take_along_axis(runs.tables, page, axis=1), runs.starts, runs.queries, keys)


def _cut_into_tiles(sequences: _Runs) -> _Runs:
    """Runs of TILE_QUERIES at most, each with the context up to its own last query."""
    sequence, number = _split(-(-sequences.queries // TILE_QUERIES))
    whole = sequences[sequence]
    skipped = number * TILE_QUERIES
    queries = np.minimum(whole.queries - skipped, TILE_QUERIES)
    return _Runs(whole.tables, whole.starts + skipped, queries, whole.keys - whole.queries + skipped + queries)


def _batches(tiles: _Runs) -> list[Ints]:
    """Batches tiles, the longest first, as long as padding costs less than one more call."""
    batches: list[list[int]] = []
    max_queries = max_keys = pairs = 0
    for tile in np.lexsort((tiles.queries, tiles.keys))[::-1].tolist():
        queries, keys = int(tiles.queries[tile]), int(tiles.keys[tile])
        num_tiles = len(batches[-1]) + 1 if batches else 1
        padded = num_tiles * max(max_queries, queries) * max_keys
        if batches and padded - pairs - queries * keys <= CALL_PAIRS and num_tiles * max_keys <= SLAB_KEYS:
            batches[-1].append(tile)
            max_queries, pairs = max(max_queries, queries), padded
        else:
            batches.append([tile])
            max_queries, max_keys, pairs = queries, keys, queries * keys
    return [np.sort(batch) for batch in batches]


def _plan_tiles(tiles: _Runs, num_tokens: int, window: int | None, block_size: int) -> Tiles:
    num_tiles, num_queries, num_keys = len(tiles.starts), int(tiles.queries.max()), int(tiles.keys.max())
    # [num_tiles, num_queries]
    padding = np.arange(num_queries) >= tiles.queries[:, None]
    query = np.minimum(np.arange(num_queries), tiles.queries[:, None] - 1)
    read = torch.from_numpy((tiles.starts[:, None] + query).ravel())
    real = torch.from_numpy(np.flatnonzero(~padding)) if padding.any() else None
    # [num_tiles, num_queries, num_keys]
    key, position = np.arange(num_keys), ((tiles.keys - tiles.queries)[:, None] + query)[:, :, None]
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return Tiles(
        read=read if padding.any() or len(read) < num_tokens else None,
        real=real,
        tokens=read if real is None else read[real],
        hidden=torch.from_numpy(hidden[:, None]) if hidden.any() else None,
        num_queries=num_queries,
        num_keys=num_keys,
        pages=_plan_pages(tiles, np.zeros((num_tiles, 1), np.int64), num_keys, window, block_size),
    )


def _plan_chunks(decodes: _Runs, window: int | None, block_size: int) -> Chunks:
    num_pages = max(1, CHUNK_KEYS // block_size)
    num_keys = num_pages * block_size
    num_chunks = -(-decodes.keys // num_keys)
    context, number = _split(num_chunks)
    slabs = []
    # Slabs of about the same size, so that no small one is left at the end
    for chunks in np.array_split(np.arange(len(context)), -(-len(context) * num_keys // SLAB_KEYS)):
        whole, first_page = decodes[context[chunks]], number[chunks, None] * num_pages
        key = first_page * block_size + np.arange(num_keys)
        hidden = key >= whole.keys[:, None]
        if window is not None:
            hidden |= key < whole.keys[:, None] - window
        slabs.append(
            Slab(
                chunks=slice(int(chunks[0]), int(chunks[-1]) + 1),
                tokens=torch.from_numpy(whole.starts),
                hidden=torch.from_numpy(hidden[:, None]),
                pages=_plan_pages(whole, first_page, num_keys, window, block_size),
            )
        )
    return Chunks(
        tokens=torch.from_numpy(decodes.starts),
        context=torch.from_numpy(context),
        number=torch.from_numpy(number),
        max_chunks=int(num_chunks.max()),
        slabs=tuple(slabs),
    )


def _plan_pages(runs: _Runs, first_page: Ints, num_keys: int, window: int | None, block_size: int) -> GatheredPages:
    """The pages of `num_keys` keys of each run's context, from [num_runs, 1] first pages on."""
    page = first_page + np.arange(-(-num_keys // block_size))
    present = page * block_size < runs.keys[:, None]
    blocks = np.take_along_axis(runs.tables, np.where(present, page, 0), axis=1)
    key = first_page * block_size + np.arange(num_keys)
    beyond = key >= runs.keys[:, None]
    if window is None:
        # Padding repeats the first page, which is full unless it is also the context's last.
        harmful = np.repeat(present, block_size, axis=1) | (runs.keys < block_size)[:, None]
        unused, unused_key = np.nonzero(beyond & harmful[:, :num_keys])
    else:
        unused, unused_key = np.nonzero(beyond | (key < _first_seen(runs, window)[:, None]))
    return GatheredPages(torch.from_numpy(blocks), (torch.from_numpy(unused), torch.from_numpy(unused_key)))


def _first_seen(runs: _Runs, window: int) -> Ints:
    """The first key that each run's first query sees."""
    first: Ints = np.maximum(runs.keys - runs.queries + 1 - window, 0)
    return first


def _split(counts: Ints) -> tuple[Ints, Ints]:
    """For items of `counts` pieces each: the item of every piece, and the piece's number in its item."""
    thing = np.repeat(np.arange(len(counts)), counts)
    return thing, np.arange(len(thing)) - np.repeat(np.cumsum(counts) - counts, counts)
