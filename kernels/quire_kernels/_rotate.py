"""The kernel of `rotary_store` and `rotate_queries`: norms and rotation of queries, keys and values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, require
from quire_kernels._shapes import ceil_div, check_vector, next_power_of_2
from quire_kernels.kv_quantization import TINY
from quire_kernels.row_norm import RowNorm, row_norm_reference

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
    """The norms of a tile's heads: pointers, and by head its epsilon, whether it has a norm, and whether it is query or
    key. Those of values alone have no pointers.
    """

    query_weight: Any
    key_weight: Any
    b_epsilon: Any
    m_normed: Any
    m_query: Any
    m_key: Any


@triton.jit  # type: ignore[untyped-decorator]
def _normalized(  # type: ignore[no-untyped-def]
    norms, o_half, m_half, o_rest, m_rest, b_first, b_second, b_rest, HEAD_DIM: tl.constexpr, HALF: tl.constexpr
):
    """The three parts of heads after their norms; heads without one stay."""
    b_square = tl.sum(b_first * b_first, axis=1) + tl.sum(b_second * b_second, axis=1)
    if HEAD_DIM > 2 * HALF:
        b_square += tl.sum(b_rest * b_rest, axis=1)
    b_scale = tl.where(norms.m_normed, tl.rsqrt(b_square / HEAD_DIM + norms.b_epsilon), 1.0)[:, None]
    if norms.query_weight is not None:
        p_query, p_key, m_query, m_key = norms.query_weight, norms.key_weight, norms.m_query, norms.m_key
        b_first *= b_scale * _head_weight(p_query, p_key, o_half, m_half, m_query, m_key)
        b_second *= b_scale * _head_weight(p_query, p_key, HALF + o_half, m_half, m_query, m_key)
        if HEAD_DIM > 2 * HALF:
            b_rest *= b_scale * _head_weight(p_query, p_key, o_rest, m_rest, m_query, m_key)
    else:
        b_first *= b_scale
        b_second *= b_scale
        b_rest *= b_scale
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
    if places.key_cache is not None:
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
    value_epsilon,
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
    VALUES_ARE_KEYS: tl.constexpr,
    NORM_LAST: tl.constexpr,
    MAX_CODE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.full([], -1, tl.int64)
    if p_slots is not None:
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
    o_source = o_head
    if VALUES_ARE_KEYS:
        o_source = tl.where(m_turned, o_head, o_head - NUM_KV_HEADS)
    p_head = p_qkv + token * stride_qkv_token + o_source[:, None] * HEAD_DIM
    m_first = m_head[:, None] & m_half[None, :]
    b_first = tl.load(p_head + o_half[None, :], mask=m_first, other=0.0).to(tl.float32)
    b_second = tl.load(p_head + HALF + o_half[None, :], mask=m_first, other=0.0).to(tl.float32)
    if HEAD_DIM > 2 * HALF:
        b_rest = tl.load(p_head + o_rest[None, :], mask=m_head[:, None] & m_rest[None, :], other=0.0).to(tl.float32)
    else:
        b_rest = b_first  # not used

    HAS_NORMS: tl.constexpr = p_query_weight is not None or value_epsilon is not None
    if HAS_NORMS:
        m_normed = m_turned
        b_epsilon = tl.where(m_query, query_epsilon, key_epsilon)
        if value_epsilon is not None:
            m_normed = m_head if p_query_weight is not None else m_head & (o_head >= NUM_HEADS + NUM_KV_HEADS)
            b_epsilon = tl.where(m_turned, b_epsilon, value_epsilon)
        m_any_key = m_turned & (o_head >= NUM_HEADS)
        norms = _NormPlaces(p_query_weight, p_key_weight, b_epsilon, m_normed, m_query, m_any_key)
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
    if HAS_NORMS and NORM_LAST:
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


def launch_rotary(
    query: Tensor,
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor | None,
    kv: Sequence[Tensor | None],
    cache_strides: Sequence[int],
    slots: Tensor | None,
    attention_factor: float,
    norm: HeadNorm | None,
    value_epsilon: float | None,
    how: dict[str, Any],
) -> None:
    """Fills the queries [num_tokens, num_heads, head_dim]. `how` are the constants of the cache and of values."""
    num_tokens, num_heads, head_dim = query.shape
    if not num_tokens:
        return
    # Without a rotation, the halves are only two parts of a head.
    half = head_dim // 2 if frequencies is None else len(frequencies)
    num_rows = num_heads + 2 * how["NUM_KV_HEADS"]
    tile_heads = min(max(1, _TILE // next_power_of_2(head_dim)), next_power_of_2(num_rows))
    _rotary_store_kernel[(num_tokens, ceil_div(num_rows, tile_heads))](
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
        value_epsilon,
        qkv.stride(0),
        *cache_strides,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        NORM_LAST=norm is not None and norm.after_rotation,
        TILE_HEADS=tile_heads,
        TILE_HALF=next_power_of_2(half),
        TILE_REST=next_power_of_2(max(1, head_dim - 2 * half)),
        num_warps=4,
        **how,
    )


def turned_by_torch(
    heads: Tensor,
    positions: Tensor,
    frequencies: Tensor | None,
    attention_factor: float,
    norm: RowNorm | None,
    *,
    norm_after_rotation: bool,
) -> Tensor:
    """Queries or keys float32 [num_tokens, heads, head_dim] after their norm and rotation."""
    if norm is not None and not norm_after_rotation:
        heads = row_norm_reference(heads, norm, torch.float32)
    if frequencies is not None:
        angles = (positions[:, None].float() * frequencies).double()[:, None, :]
        cosine, sine = (angles.cos() * attention_factor).float(), (angles.sin() * attention_factor).float()
        half = len(frequencies)
        first, second, rest = torch.split(heads, [half, half, heads.shape[2] - 2 * half], dim=-1)
        heads = torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), -1)
    return row_norm_reference(heads, norm, torch.float32) if norm is not None and norm_after_rotation else heads


def check_rotation(rows: Tensor, positions: Tensor, frequencies: Tensor | None, head_dim: int) -> None:
    check_vector(positions, "positions", len(rows), torch.int64, rows.device)
    if frequencies is not None:
        require(frequencies.ndim == 1, "frequencies", "be [rotary_dim / 2]")
        require(1 <= len(frequencies) <= head_dim // 2, "frequencies", "be at least one, and no more than head_dim / 2")
        check_vector(frequencies, "frequencies", len(frequencies), torch.float32, rows.device)


def check_head_weight(weight: Tensor, argument: str, head_dim: int, device: torch.device) -> None:
    require(weight.dtype in FLOAT_DTYPES, argument, "be float32, float16 or bfloat16")
    check_vector(weight, argument, head_dim, weight.dtype, device)
