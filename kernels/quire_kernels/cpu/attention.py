"""Attention over the paged cache, in place.

The cache is laid out for it: in a block, keys lie dimension by dimension, values token by token, and of bfloat16 always
two side by side (`csrc/kv_cache.h`). Only the compiled ops read and write it. In 8 bits it has codes in that order,
and a scale for each key and value, as in `quire_kernels.kv_quantization`.
"""

import math
from collections.abc import Iterable
from ctypes import Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels.cpu.amx import has_amx
from quire_kernels.cpu.thread_pool import ThreadPool, type_of


class CacheArgs(Structure):
    """`Cache` of kv_cache.h."""

    _fields_ = (
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("value_offset", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("scales", c_void_p),
    )


class SequencesArgs(Structure):
    """`Sequences` of attention.h."""

    _fields_ = (
        ("count", c_int64),
        ("max_blocks", c_int64),
        ("block_tables", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
    )


class RuleArgs(Structure):
    """`AttentionRule` of attention.h."""

    _fields_ = (
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int64),
        ("bidirectional", c_int64),
        ("sinks", c_void_p),
    )


# The lanes of a vector: a head's dimensions and groups of keys are multiples of it.
_LANES = 16


def check_compiled_support(head_dims: Iterable[int], block_size: int, dtype: torch.dtype) -> str | None:
    """Why the compiled kernels do not support a cache, or None. `head_dims` are those of its layers, `dtype` is that of
    the computation.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they compute in float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if (unfit := next((dim for dim in head_dims if dim % _LANES), None)) is not None:
        return f"a head's dimensions must be a multiple of {_LANES}, not {unfit}"
    if block_size % _LANES and block_size != _LANES // 2:
        return f"the block size must be 8 or a multiple of {_LANES}, not {block_size}"
    return None


@dataclass(frozen=True, eq=False)
class CacheLayer:
    """One layer's keys and values in a cache: views [num_blocks, num_kv_heads, block_size, head_dim].

    Of the last two dimensions only the product of the sizes matters: within a head's block, the ops have their own
    order. Block size 8 or a multiple of 16; head dimensions a multiple of 16.
    """

    keys: Tensor
    values: Tensor
    """Of each block right behind its keys."""
    key_scales: Tensor | None = None
    """float32 [num_blocks, num_kv_heads, block_size], where the cache is int8; its blocks are as many bytes apart as
    the cache's.
    """
    value_scales: Tensor | None = None
    """Of each block right behind the scales of keys."""

    def args(self, dtype: torch.dtype) -> CacheArgs:
        """The library's structure, valid as long as this object. `dtype`: of the computation."""
        require(self.keys.ndim == 4, "keys", "be [num_blocks, num_kv_heads, block_size, head_dim]")
        _, num_kv_heads, block_size, head_dim = self.keys.shape
        unsupported_reason = check_compiled_support([head_dim], block_size, dtype)
        require(
            unsupported_reason is None, "keys", f"be such that the compiled kernels take them: {unsupported_reason}"
        )
        expected = dtype if self.key_scales is None else torch.int8
        _check_halves("keys", self.keys, "values", self.values, expected)
        half, stride = num_kv_heads * block_size * head_dim, block_stride(self.keys)
        data = self.keys.data_ptr()
        if self.key_scales is None or self.value_scales is None:
            require(self.value_scales is None, "value_scales", "be absent, as key_scales")
            return CacheArgs(data, stride, half, num_kv_heads, block_size, head_dim, None)
        require(self.key_scales.shape == self.keys.shape[:-1], "key_scales", "be one of each key")
        _check_halves("key_scales", self.key_scales, "value_scales", self.value_scales, torch.float32)
        are_aligned = len(self.keys) == 1 or block_stride(self.key_scales) == stride
        require(are_aligned, "key_scales", "be in blocks as far apart as those of the cache")
        return CacheArgs(data, stride, half, num_kv_heads, block_size, head_dim, self.key_scales.data_ptr())


def _check_halves(name: str, first: Tensor, second_name: str, second: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError unless both tensors have blocks of this dtype, each of the second right behind the first's."""
    require(first.dtype == dtype, name, f"be {dtype}")
    require(not len(first) or first[0].is_contiguous(), name, "be contiguous in each block")
    is_alike = (second.shape, second.stride(), second.dtype) == (first.shape, first.stride(), first.dtype)
    size = math.prod(first.shape[1:]) * first.element_size()
    is_behind = is_alike and second.data_ptr() - first.data_ptr() == size
    require(is_behind, second_name, f"be right behind {name} in each block")


def block_stride(tensor: Tensor) -> int:
    """Bytes from one block of a cache, or of its scales, to the next."""
    return tensor.stride(0) * tensor.element_size()


def store(thread_pool: ThreadPool, key: Tensor, value: Tensor, layer: CacheLayer, slots: Tensor) -> None:
    """Writes each token's key and value [num_tokens, num_kv_heads, head_dim] to its slot.

    Each token's heads are contiguous; `slots` int64 [num_tokens], -1 for a token that is not stored.
    """
    for name, tensor in (("key", key), ("value", value)):
        _check_tokens(name, tensor, layer, layer.keys.shape[1])
    require(value.dtype == key.dtype, "value", "have the dtype of key")
    require(len(value) == len(key), "value", "be of as many tokens as key")
    is_list = slots.dtype == torch.int64 and slots.shape == (len(key),) and slots.is_contiguous()
    require(is_list, "slots", "be int64 [num_tokens], contiguous")
    thread_pool.library.quire_store(
        thread_pool.handle,
        type_of(key.dtype),
        byref(layer.args(key.dtype)),
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        slots.data_ptr(),
        len(key),
    )


def attend(
    thread_pool: ThreadPool,
    query: Tensor,
    layer: CacheLayer,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    bidirectional: bool = False,
    sinks: Tensor | None = None,
    use_amx: bool = False,
) -> Tensor:
    """Attention of each sequence's newest tokens over its pages, causal as in `paged_attention` unless `bidirectional`.

    A query's result does not depend on how its sequence was cut into steps, or on what else is in the step. Factors
    are rounded to the dtype of `query`, the weights of the softmax among them; sums are float32.

    Args:
        query: [num_tokens, num_heads, head_dim], contiguous.
        block_tables, query_starts, context_lens: int32, see `paged_attention`.
        scale: the factor of scores, above 0.
        window: a query sees itself and the window - 1 tokens before it; None: all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap), above 0; None: no cap.
        bidirectional: whether a query also sees the tokens after it, of a window the next window - 1.
        sinks: float32 [num_heads], contiguous, one more score of each head, of a key without a value; None: none.
        use_amx: whether tile registers compute the products, of bfloat16 on a processor with AMX. Heads whose
            dimensions are no multiple of 32, and blocks of 8 tokens, are computed in vectors all the same.

    Returns:
        [num_tokens, num_heads, head_dim], of the dtype of `query`.
    """
    num_kv_heads = layer.keys.shape[1]
    _check_tokens("query", query, layer, query.shape[1])
    require(query.is_contiguous(), "query", "be contiguous")
    require(query.shape[1] % num_kv_heads == 0, "query", "have a multiple of the cache's num_kv_heads heads")
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_starts", query_starts),
        ("context_lens", context_lens),
    ):
        require(tensor.dtype == torch.int32 and tensor.is_contiguous(), name, "be int32 and contiguous")
    require(scale > 0, "scale", "be above 0")
    require(soft_cap is None or soft_cap > 0, "soft_cap", "be above 0")
    require(window is None or window >= 1, "window", "be at least 1")
    if sinks is not None:
        is_list = sinks.dtype == torch.float32 and sinks.shape == (query.shape[1],) and sinks.is_contiguous()
        require(is_list, "sinks", "be float32 [num_heads], contiguous")
    kind = type_of(query.dtype)
    require(not use_amx or query.dtype == torch.bfloat16, "use_amx", "be false for another dtype than bfloat16")
    require(not use_amx or has_amx(thread_pool), "use_amx", "be false on a processor without AMX")
    require(context_lens.ndim == 1, "context_lens", "be [num_seqs]")
    num_sequences = len(context_lens)
    require(block_tables.ndim == 2 and len(block_tables) == num_sequences, "block_tables", "be [num_seqs, max_blocks]")
    require(query_starts.shape == (num_sequences + 1,), "query_starts", "be [num_seqs + 1]")
    output = torch.empty_like(query)
    sequences = SequencesArgs(
        len(context_lens),
        block_tables.shape[1],
        block_tables.data_ptr(),
        query_starts.data_ptr(),
        context_lens.data_ptr(),
    )
    thread_pool.library.quire_attend(
        thread_pool.handle,
        kind,
        int(use_amx),
        byref(layer.args(query.dtype)),
        byref(sequences),
        byref(
            RuleArgs(scale, soft_cap or 0.0, window or 0, bidirectional, None if sinks is None else sinks.data_ptr())
        ),
        query.shape[1] // num_kv_heads,
        query.data_ptr(),
        output.data_ptr(),
    )
    return output


def _check_tokens(name: str, tensor: Tensor, layer: CacheLayer, num_heads: int) -> None:
    head_dim = layer.keys.shape[3]
    require(
        tensor.ndim == 3 and tensor.shape[1:] == (num_heads, head_dim), name, f"be [tokens, {num_heads}, {head_dim}]"
    )
    # The stride of a single head is arbitrary.
    is_contiguous = tensor.stride(2) == 1 and (num_heads == 1 or tensor.stride(1) == head_dim)
    require(is_contiguous, name, "be contiguous in each token")
    require(layer.key_scales is not None or tensor.dtype == layer.keys.dtype, name, "have the dtype of the cache")
