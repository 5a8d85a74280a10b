"""Rotates a step's queries and keys by their positions, and stores keys and values.

Rotary position embedding (arXiv:2104.09864) in the half-split layout: dimension i of the first half rotates with
dimension i of the second. The norm per head that some models have before it or after it, and the codes of a quantized
cache, are part of the op. Layers without positions rotate nothing.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, PagedKV, check_cache, check_index, check_like, require
from quire_kernels._shapes import ceil_div, check_rows, check_vector, next_power_of_2
from quire_kernels.kv_quantization import MAX_CODES, TINY
from quire_kernels.row_norm import RowNorm, row_norm_reference
from quire_kernels.store_kv import store_kv_reference

# Elements that a program holds, in whole heads
_TILE = 2048


class HeadNorm(NamedTuple):
    """The root mean square norms of each query head and each key head, before the rotation or `after_rotation`."""

    query_weight: Tensor
    key_weight: Tensor
    query_epsilon: float
    key_epsilon: float
    after_rotation: bool = False


@triton.jit  # type: ignore[untyped-decorator]
def _codes(b_part, b_factor, code_dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part of the rows as codes, rounded as `kv_quantization.quantize_rows` does."""
    b_codes = b_part * b_factor[:, None]
    if code_dtype == tl.int8:
        b_codes = tl.floor(b_codes + 0.5)
    return b_codes.to(code_dtype)


@triton.jit
def _head_weight(p_query_weight, p_key_weight, o_dim, m_dim, m_query, m_key):  # type: ignore[no-untyped-def]
    """The factor of a norm for dimensions [dims] of heads [heads]; 1 for values."""
    b_query = tl.load(p_query_weight + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    b_key = tl.load(p_key_weight + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    return tl.where(m_query[:, None], b_query[None, :], tl.where(m_key[:, None], b_key[None, :], 1.0))


class _NormPlaces(NamedTuple):
    """The norms of a tile's heads: pointers, and by head its epsilon and whether it is query or key."""

    query_weight: Any
    key_weight: Any
    b_epsilon: Any
    m_query: Any
    m_key: Any


@triton.jit  # type: ignore[untyped-decorator]
def _normalized(  # type: ignore[no-untyped-def]
    norms, o_half, m_half, o_rest, m_rest, b_first, b_second, b_rest, HEAD_DIM: tl.constexpr, HALF: tl.constexpr
):
    """The three parts of heads after their norms; values stay."""
    b_square = tl.sum(b_first * b_first, axis=1) + tl.sum(b_second * b_second, axis=1)
    if HEAD_DIM > 2 * HALF:
        b_square += tl.sum(b_rest * b_rest, axis=1)
    m_turned = norms.m_query | norms.m_key
    b_scale = tl.where(m_turned, tl.rsqrt(b_square / HEAD_DIM + norms.b_epsilon), 1.0)[:, None]
    p_query, p_key, m_query, m_key = norms.query_weight, norms.key_weight, norms.m_query, norms.m_key
    b_first *= b_scale * _head_weight(p_query, p_key, o_half, m_half, m_query, m_key)
    b_second *= b_scale * _head_weight(p_query, p_key, HALF + o_half, m_half, m_query, m_key)
    if HEAD_DIM > 2 * HALF:
        b_rest *= b_scale * _head_weight(p_query, p_key, o_rest, m_rest, m_query, m_key)
    return b_first, b_second, b_rest


class _HeadPlaces(NamedTuple):
    """Where each head of a tile is stored: pointers, and by head its offset and whether it is query, key or value."""

    query: Any
    key_cache: Any
    value_cache: Any
    o_query: Any
    o_cache: Any
    m_query: Any
    m_key: Any
    m_value: Any


@triton.jit
def _store_part(places, o_dim, m_dim, b_part, b_factor):  # type: ignore[no-untyped-def]
    """Stores one part of the dimensions of all heads."""
    o_query = places.o_query[:, None] + o_dim[None, :]
    o_cache = places.o_cache[:, None] + o_dim[None, :]
    b_query = b_part.to(places.query.dtype.element_ty)
    tl.store(places.query + o_query, b_query, mask=places.m_query[:, None] & m_dim[None, :])
    code_dtype: tl.constexpr = places.key_cache.dtype.element_ty
    b_stored = b_part.to(code_dtype) if b_factor is None else _codes(b_part, b_factor, code_dtype)
    tl.store(places.key_cache + o_cache, b_stored, mask=places.m_key[:, None] & m_dim[None, :])
    tl.store(places.value_cache + o_cache, b_stored, mask=places.m_value[:, None] & m_dim[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _rotary_store_kernel(  # type: ignore[no-untyped-def]
    p_query,
    p_qkv,
    p_positions,
    p_frequencies,
    p_key_cache,
    p_value_cache,
    p_key_scales,
    p_value_scales,
    p_slots,
    p_query_weight,
    p_key_weight,
    attention_factor,
    query_epsilon,
    key_epsilon,
    stride_qkv_token,
    stride_cache_block,
    stride_cache_head,
    stride_cache_slot,
    stride_scale_block,
    stride_scale_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM_LAST: tl.constexpr,
    MAX_CODE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + token)

    # Queries, keys and values follow one another in the product: a row of the tile is a head of any of them.
    o_head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    m_head = o_head < NUM_HEADS + 2 * NUM_KV_HEADS
    m_query = o_head < NUM_HEADS
    m_turned = o_head < NUM_HEADS + NUM_KV_HEADS
    m_key = m_turned & (o_head >= NUM_HEADS) & (slot >= 0)
    m_value = m_head & (o_head >= NUM_HEADS + NUM_KV_HEADS) & (slot >= 0)
    o_half = tl.arange(0, TILE_HALF)
    m_half = o_half < HALF
    o_rest = 2 * HALF + tl.arange(0, TILE_REST)
    m_rest = o_rest < HEAD_DIM

    # [TILE_HEADS, TILE_HALF] twice, [TILE_HEADS, TILE_REST]
    p_head = p_qkv + token * stride_qkv_token + o_head[:, None] * HEAD_DIM
    m_first = m_head[:, None] & m_half[None, :]
    b_first = tl.load(p_head + o_half[None, :], mask=m_first, other=0.0).to(tl.float32)
    b_second = tl.load(p_head + HALF + o_half[None, :], mask=m_first, other=0.0).to(tl.float32)
    if HEAD_DIM > 2 * HALF:
        b_rest = tl.load(p_head + o_rest[None, :], mask=m_head[:, None] & m_rest[None, :], other=0.0).to(tl.float32)
    else:
        b_rest = b_first  # not used

    if p_query_weight is not None:
        b_epsilon = tl.where(m_query, query_epsilon, key_epsilon)
        norms = _NormPlaces(p_query_weight, p_key_weight, b_epsilon, m_query, m_turned & (o_head >= NUM_HEADS))
        if not NORM_LAST:
            b_first, b_second, b_rest = _normalized(
                norms, o_half, m_half, o_rest, m_rest, b_first, b_second, b_rest, HEAD_DIM, HALF
            )

    if p_frequencies is not None:
        # [TILE_HALF]; the angle is the float32 product that models are trained with. Sine and cosine are libdevice's,
        # which reduce their argument exactly: at position 131,072 the device's fast ones would be far off.
        position = tl.load(p_positions + token).to(tl.float32)
        b_angle = position * tl.load(p_frequencies + o_half, mask=m_half, other=0.0)
        b_cosine = tl.where(m_turned[:, None], (tl.cos(b_angle) * attention_factor)[None, :], 1.0)
        b_sine = tl.where(m_turned[:, None], (tl.sin(b_angle) * attention_factor)[None, :], 0.0)
        b_left = b_first * b_cosine - b_second * b_sine
        b_right = b_second * b_cosine + b_first * b_sine
    else:
        b_left = b_first
        b_right = b_second
    if p_query_weight is not None and NORM_LAST:
        b_left, b_right, b_rest = _normalized(
            norms, o_half, m_half, o_rest, m_rest, b_left, b_right, b_rest, HEAD_DIM, HALF
        )

    o_query = (token * NUM_HEADS + o_head) * HEAD_DIM
    # In 64 bits: a block's stride spans all layers
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    o_kv_head = tl.where(m_turned, o_head - NUM_HEADS, o_head - NUM_HEADS - NUM_KV_HEADS)
    o_cache = block * stride_cache_block + offset * stride_cache_slot + o_kv_head * stride_cache_head
    if p_key_scales is not None:
        b_largest = tl.maximum(tl.max(tl.abs(b_left), axis=1), tl.max(tl.abs(b_right), axis=1))
        if HEAD_DIM > 2 * HALF:
            b_largest = tl.maximum(b_largest, tl.max(tl.abs(b_rest), axis=1))
        b_factor = MAX_CODE / tl.maximum(b_largest, TINY)
        o_scale = block * stride_scale_block + o_kv_head * stride_scale_head + offset
        tl.store(p_key_scales + o_scale, b_largest / MAX_CODE, mask=m_key)
        tl.store(p_value_scales + o_scale, b_largest / MAX_CODE, mask=m_value)
    else:
        b_factor = None
    places = _HeadPlaces(p_query, p_key_cache, p_value_cache, o_query, o_cache, m_query, m_key, m_value)
    _store_part(places, o_half, m_half, b_left, b_factor)
    _store_part(places, HALF + o_half, m_half, b_right, b_factor)
    if HEAD_DIM > 2 * HALF:
        _store_part(places, o_rest, m_rest, b_rest, b_factor)


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
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Rotates queries and keys, writes keys and values to their slots of the cache, and returns the queries.

    All is computed in float32 and rounded once. A model's scaling (linear, llama3, yarn) is in `frequencies`.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys and values side by side, last
            dimension contiguous.
        positions: int64 [num_tokens].
        frequencies: float32 [rotary_dim / 2], radians per position; of each head the first rotary_dim dimensions are
            rotated. None: nothing is rotated.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], one layer's views of the cache, of
            the dtype of `qkv`, or int8 or float8_e4m3fn with scales.
        slots: int64 [num_tokens], block * block_size + offset in the block, or -1 for a token that is not stored.
            No two tokens may share a slot.
        attention_factor: the factor of sines and cosines (yarn, arXiv:2309.00071).
        norm: the norms per head, whose weights are [head_dim] and contiguous; None: there are none.
        key_scales, value_scales: float32 [num_blocks, num_kv_heads, block_size], one layer's views, for a cache in 8
            bits (`kv_quantization`); written beside it.

    Returns:
        The queries [num_tokens, num_heads, head_dim], contiguous, of the dtype of `qkv`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device. The slots' values are not checked.
    """
    kv = PagedKV(key_cache, value_cache, key_scales, value_scales)
    num_heads = _check(qkv, positions, frequencies, kv, slots, norm)
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    query = torch.empty((len(qkv), num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not len(qkv):
        return query
    # Without a rotation, the halves are only two parts of a head.
    half = head_dim // 2 if frequencies is None else len(frequencies)
    num_rows = num_heads + 2 * num_kv_heads
    tile_heads = min(max(1, _TILE // next_power_of_2(head_dim)), next_power_of_2(num_rows))
    _rotary_store_kernel[(len(qkv), ceil_div(num_rows, tile_heads))](
        query,
        qkv,
        positions,
        frequencies,
        *kv,
        slots,
        None if norm is None else norm.query_weight,
        None if norm is None else norm.key_weight,
        attention_factor,
        0.0 if norm is None else norm.query_epsilon,
        0.0 if norm is None else norm.key_epsilon,
        qkv.stride(0),
        *kv.strides,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_SIZE=block_size,
        NORM_LAST=norm is not None and norm.after_rotation,
        MAX_CODE=MAX_CODES.get(key_cache.dtype),
        TILE_HEADS=tile_heads,
        TILE_HALF=next_power_of_2(half),
        TILE_REST=next_power_of_2(max(1, head_dim - 2 * half)),
        num_warps=4,
    )
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
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """`rotary_store` in plain torch, with sines and cosines in float64."""
    kv = PagedKV(key_cache, value_cache, key_scales, value_scales)
    num_heads = _check(qkv, positions, frequencies, kv, slots, norm)
    num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    heads = qkv.float().view(len(qkv), -1, head_dim)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)

    def normalize(heads: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return row_norm_reference(heads, RowNorm(weight, epsilon), torch.float32)

    def rotate(heads: Tensor) -> Tensor:
        if frequencies is None:
            return heads
        angles = (positions[:, None].float() * frequencies).double()[:, None, :]
        cosine, sine = (angles.cos() * attention_factor).float(), (angles.sin() * attention_factor).float()
        half = len(frequencies)
        first, second, rest = torch.split(heads, [half, half, head_dim - 2 * half], dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), -1)

    if norm is not None and not norm.after_rotation:
        query = normalize(query, norm.query_weight, norm.query_epsilon)
        key = normalize(key, norm.key_weight, norm.key_epsilon)
    query, key = rotate(query), rotate(key)
    if norm is not None and norm.after_rotation:
        query = normalize(query, norm.query_weight, norm.query_epsilon)
        key = normalize(key, norm.key_weight, norm.key_epsilon)
    store_kv_reference(key, value, key_cache, value_cache, slots, key_scales=key_scales, value_scales=value_scales)
    return query.to(qkv.dtype)


def _check(
    qkv: Tensor, positions: Tensor, frequencies: Tensor | None, kv: PagedKV, slots: Tensor, norm: HeadNorm | None
) -> int:
    """The number of query heads, if all is well."""
    check_rows(qkv, "qkv")
    check_cache(kv)
    key_cache = kv.key_cache
    check_like(qkv, key_cache, "qkv")
    num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    require(
        num_heads >= 1 and qkv.shape[1] % head_dim == 0, "qkv", "hold query heads beside key_cache's num_kv_heads twice"
    )
    check_index(slots, key_cache, (len(qkv),), torch.int64, "slots")
    check_index(positions, key_cache, (len(qkv),), torch.int64, "positions")
    if frequencies is not None:
        require(frequencies.ndim == 1, "frequencies", "be [rotary_dim / 2]")
        require(1 <= len(frequencies) <= head_dim // 2, "frequencies", "be at least one, and no more than head_dim / 2")
        check_index(frequencies, key_cache, (len(frequencies),), torch.float32, "frequencies")
    if norm is not None:
        for weight, argument in ((norm.query_weight, "norm.query_weight"), (norm.key_weight, "norm.key_weight")):
            require(weight.dtype in FLOAT_DTYPES, argument, "be float32, float16 or bfloat16")
            check_vector(weight, argument, head_dim, weight.dtype, qkv.device)
    return num_heads
