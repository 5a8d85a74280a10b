"""Rotates a step's queries and keys by their positions, and stores keys and values.

Rotary position embedding (arXiv:2104.09864) in the half-split layout: dimension i of the first half rotates with
dimension i of the second. The norm per head that some models have before it or after it, that of values, and the codes
of a quantized cache, are part of the op. Layers without positions rotate nothing, and layers that read the keys and
values of another store nothing.
"""

from typing import Any

import torch
from torch import Tensor

from quire_kernels._checks import PagedKV, check_cache, check_index, check_like, require
from quire_kernels._rotate import HeadNorm, check_head_weight, check_rotation, launch_rotary, turned_by_torch
from quire_kernels._shapes import check_rows
from quire_kernels.kv_quantization import MAX_CODES
from quire_kernels.row_norm import RowNorm, row_norm_reference
from quire_kernels.store_kv import store_kv_reference

__all__ = ["HeadNorm", "rotary_store", "rotary_store_reference"]


def rotary_store(
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    attention_factor: float = 1.0,
    norm: HeadNorm | None = None,
    value_epsilon: float | None = None,
    values_are_keys: bool = False,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Rotates queries and keys, writes keys and values to their slots of the cache, and returns the queries.

    All is computed in float32 and rounded once. A model's scaling (linear, llama3, yarn) is in `frequencies`.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys and values side by side, last
            dimension contiguous; with `values_are_keys` without values.
        positions: int64 [num_tokens].
        frequencies: float32 [rotary_dim / 2], radians per position; of each head the first rotary_dim dimensions are
            rotated. None: nothing is rotated.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], one layer's views of the cache, of
            the dtype of `qkv`, or int8 or float8_e4m3fn with scales.
        slots: int64 [num_tokens], block * block_size + offset in the block, or -1 for a token that is not stored.
            No two tokens may share a slot.
        attention_factor: the factor of sines and cosines (yarn, arXiv:2309.00071).
        norm: the norms per head, whose weights are [head_dim] and contiguous; None: there are none.
        value_epsilon: that of a root mean square norm without a weight of each value head; None: there is none.
        values_are_keys: values are the keys before their norm and rotation.
        key_scales, value_scales: float32 [num_blocks, num_kv_heads, block_size], one layer's views, for a cache in 8
            bits (`kv_quantization`); written beside it.

    Returns:
        The queries [num_tokens, num_heads, head_dim], contiguous, of the dtype of `qkv`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device. The slots' values are not checked.
    """
    kv = PagedKV(key_cache, value_cache, key_scales, value_scales)
    num_heads = _check(qkv, positions, frequencies, kv, slots, norm, values_are_keys)
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    query = torch.empty((len(qkv), num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    how: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "VALUES_ARE_KEYS": values_are_keys,
        "MAX_CODE": MAX_CODES.get(key_cache.dtype),
    }
    launch_rotary(query, qkv, positions, frequencies, kv, kv.strides, slots, attention_factor, norm, value_epsilon, how)
    return query


def rotary_store_reference(
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    attention_factor: float = 1.0,
    norm: HeadNorm | None = None,
    value_epsilon: float | None = None,
    values_are_keys: bool = False,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """`rotary_store` in plain torch, with sines and cosines in float64."""
    kv = PagedKV(key_cache, value_cache, key_scales, value_scales)
    num_heads = _check(qkv, positions, frequencies, kv, slots, norm, values_are_keys)
    num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    heads = qkv.float().view(len(qkv), -1, head_dim)
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    value = key if values_are_keys else heads[:, num_heads + num_kv_heads :]
    if value_epsilon is not None:
        value = row_norm_reference(value, RowNorm(value.new_ones(head_dim), value_epsilon))
    after = norm is not None and norm.after_rotation
    query, key = (
        turned_by_torch(part, positions, frequencies, attention_factor, of_part, norm_after_rotation=after)
        for part, of_part in (
            (query, norm and RowNorm(norm.query_weight, norm.query_epsilon)),
            (key, norm and RowNorm(norm.key_weight, norm.key_epsilon)),
        )
    )
    store_kv_reference(key, value, key_cache, value_cache, slots, key_scales=key_scales, value_scales=value_scales)
    return query.to(qkv.dtype)


def _check(
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor | None,
    kv: PagedKV,
    slots: Tensor,
    norm: HeadNorm | None,
    values_are_keys: bool,
) -> int:
    """The number of query heads, if all is well."""
    check_rows(qkv, "qkv")
    check_cache(kv)
    key_cache = kv.key_cache
    check_like(qkv, key_cache, "qkv")
    num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    num_parts = 1 if values_are_keys else 2
    num_heads = qkv.shape[1] // head_dim - num_parts * num_kv_heads
    is_fit = num_heads >= 1 and qkv.shape[1] % head_dim == 0
    times = "once" if values_are_keys else "twice"
    require(is_fit, "qkv", f"hold query heads beside key_cache's num_kv_heads {times}")
    check_index(slots, key_cache, (len(qkv),), torch.int64, "slots")
    check_rotation(qkv, positions, frequencies, head_dim)
    if norm is not None:
        for weight, argument in ((norm.query_weight, "norm.query_weight"), (norm.key_weight, "norm.key_weight")):
            check_head_weight(weight, argument, head_dim, qkv.device)
    return num_heads
