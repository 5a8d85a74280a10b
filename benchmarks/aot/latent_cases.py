"""Calls of the kernels that DeepSeek's models need beside those of all models: attention with latent vectors, the
products around it, and the choice of experts within groups.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.aot.case import (
    BF16,
    CONTEXT_LENGTH,
    DTYPE_NAMES,
    FP8,
    FP32,
    INT8,
    META,
    NUM_ROWS,
    NUM_TOKENS,
    Case,
    empty,
)
from quire_kernels.choose_experts import Groups, choose_experts
from quire_kernels.decode_plan import DecodePlan
from quire_kernels.head_linear import head_linear
from quire_kernels.latent_attention import latent_attention, latent_queries_per_tile
from quire_kernels.latent_decode import latent_decode, latent_splits
from quire_kernels.latent_store import latent_store
from quire_kernels.prefill_tiles import PrefillTiles, most_tiles
from quire_kernels.row_norm import RowNorm
from worker_svc.cache import CacheShape, LayerCache

_RANK, _ROTATED = 512, 64
"""Of the latent vectors and rotated keys of DeepSeek-V2 and V3."""


def _cache(block_size: int, kv: torch.dtype) -> LayerCache:
    """The second of two layers, as a worker lays its cache out."""
    return (
        CacheShape.of_equal_layers(2, 1, block_size, _RANK + _ROTATED, kv, keys_hold_values=True)
        .allocate(4096, META)
        .layers[1]
    )


def _attention(num_heads: int, dtype: torch.dtype, kv: torch.dtype, block_size: int, *, is_decode: bool) -> None:
    """Prefill or decode."""
    num_seqs, width = (NUM_ROWS, 1) if is_decode else (4, 512)
    cache = _cache(block_size, kv)
    query = empty(num_seqs * width, num_heads, _RANK + _ROTATED, dtype=dtype)
    tables = empty(num_seqs, CONTEXT_LENGTH // block_size, dtype=torch.int32)
    contexts = empty(num_seqs, dtype=torch.int32)
    if not is_decode:
        starts = empty(num_seqs + 1, dtype=torch.int32)
        queries = latent_queries_per_tile(num_heads, _RANK, _ROTATED, dtype, kv, META)
        num_tiles = most_tiles(num_seqs * width, num_seqs, queries)
        tiles, scales = PrefillTiles(queries, empty(num_tiles, 2, dtype=torch.int32)), cache.key_scales
        latent_attention(query, cache.keys, tables, starts, contexts, _RANK, 0.1, key_scales=scales, tiles=tiles)
        return
    splits = latent_splits(num_heads, _RANK, _ROTATED, dtype, kv, META)
    plan = DecodePlan.make(splits, np.full(num_seqs, CONTEXT_LENGTH, np.int32), META)
    latent_decode(query, cache.keys, tables, contexts, plan, _RANK, 0.1, key_scales=cache.key_scales)


def _products(num_heads: int, dtype: torch.dtype, kv: torch.dtype) -> None:
    """What latent attention computes before and after its scores."""
    width = _RANK + _ROTATED
    cache = _cache(16, kv)
    kv_up = empty(num_heads, 256, _RANK, dtype=dtype)
    heads = empty(NUM_TOKENS, num_heads, 128 + _ROTATED, dtype=dtype)
    query = empty(NUM_TOKENS, num_heads, width, dtype=dtype)
    ids = empty(NUM_TOKENS, dtype=torch.int64)
    head_linear(heads[..., :128], kv_up[:, :128].transpose(1, 2), out=query[..., :_RANK])
    latent_store(
        empty(NUM_TOKENS, 1536 + width, dtype=dtype)[:, 1536:],
        heads[..., 128:],
        ids,
        empty(_ROTATED // 2, dtype=FP32),
        RowNorm(empty(_RANK, dtype=dtype), 1e-6),
        cache.keys,
        ids,
        query,
        rotates_neighbours=True,
        key_scales=cache.key_scales,
    )
    head_linear(empty(NUM_TOKENS, num_heads, _RANK, dtype=dtype), kv_up[:, 128:])


def _router() -> None:
    scores, bias = empty(NUM_TOKENS, 256, dtype=FP32), empty(256, dtype=FP32)
    choose_experts(scores, 256, 8, normalized=True, scale=2.5, sigmoid=True, bias=bias, groups=Groups(8, 4, 2))


def latent_cases() -> Iterator[Case]:
    """All of them, each with a name of its own."""
    settings = [(16, BF16, BF16, 16), (128, BF16, BF16, 16), (16, FP32, FP32, 16), (128, BF16, BF16, 64)]
    settings += [(128, BF16, FP8, 16), (16, BF16, INT8, 16), (16, FP32, FP8, 16), (16, FP32, INT8, 16)]
    for num_heads, dtype, kv, block_size in settings:
        how = f"{num_heads} heads, {DTYPE_NAMES[dtype]}" + (f", KV {DTYPE_NAMES[kv]}" if kv != dtype else "")
        how += f", blocks of {block_size}" if block_size != 16 else ""
        for kind, is_decode in (("prefill", False), ("decode", True)):
            call = partial(_attention, num_heads, dtype, kv, block_size, is_decode=is_decode)
            yield Case(f"latent {kind}: {how}", call, dtype, kv == FP8)
    products = [(128, BF16, BF16), (16, FP32, FP32), (128, BF16, FP8), (128, BF16, INT8)]
    products += [(16, FP32, FP8), (16, FP32, INT8)]
    for num_heads, dtype, kv in products:
        how = f"{num_heads} heads, {DTYPE_NAMES[dtype]}" + (f", KV {DTYPE_NAMES[kv]}" if kv != dtype else "")
        call = partial(_products, num_heads, dtype, kv)
        yield Case(f"latent products: {how}", call, dtype, kv == FP8)
    yield Case("choice of 8 of 256 experts, of 4 of 8 groups", _router)
