"""Stores the keys and values of a step's tokens in the pages of the KV cache."""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import PagedKV, check_store_kv
from quire_kernels._shapes import next_power_of_2
from quire_kernels.kv_quantization import MAX_CODES, quantize, quantize_rows


@triton.jit  # type: ignore[untyped-decorator]
def _store_kv_kernel(  # type: ignore[no-untyped-def]
    p_key,
    p_value,
    p_key_cache,
    p_value_cache,
    p_key_scales,
    p_value_scales,
    p_slots,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cache_block,
    stride_cache_head,
    stride_cache_slot,
    stride_scale_block,
    stride_scale_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_CODE: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + token)
    if slot < 0:
        return
    # In 64 bits: a block's stride spans all layers, so a cache soon outgrows 2^31 elements
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    # All heads of the token in one go
    o_head = tl.arange(0, TILE_H)
    o_dim = tl.arange(0, TILE_D)[None, :]
    m_head = o_head < NUM_KV_HEADS
    m_element = m_head[:, None] & (o_dim < HEAD_DIM)
    # [TILE_H, TILE_D]
    o_key = token * stride_key_token + o_head[:, None] * stride_key_head + o_dim
    o_value = token * stride_value_token + o_head[:, None] * stride_value_head + o_dim
    b_key = tl.load(p_key + o_key, mask=m_element, other=0.0)
    b_value = tl.load(p_value + o_value, mask=m_element, other=0.0)
    if p_key_scales is not None:
        b_key, b_key_scale = quantize_rows(b_key, MAX_CODE, p_key_cache.dtype.element_ty)
        b_value, b_value_scale = quantize_rows(b_value, MAX_CODE, p_value_cache.dtype.element_ty)
        # [TILE_H]
        o_scale = block * stride_scale_block + o_head * stride_scale_head + offset
        tl.store(p_key_scales + o_scale, b_key_scale, mask=m_head)
        tl.store(p_value_scales + o_scale, b_value_scale, mask=m_head)
    # [TILE_H, TILE_D]
    o_cache = block * stride_cache_block + offset * stride_cache_slot + o_head[:, None] * stride_cache_head + o_dim
    tl.store(p_key_cache + o_cache, b_key, mask=m_element)
    tl.store(p_value_cache + o_cache, b_value, mask=m_element)


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Writes each token's key and value to its slot of the cache, in place.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], last dimension contiguous.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], one layer's views of the cache, of
            the dtype of `key`, or int8 or float8_e4m3fn with scales.
        slots: int64 [num_tokens], block * block_size + offset in the block, or -1 for a token that is not stored.
            No two tokens may share a slot.
        key_scales, value_scales: float32 [num_blocks, num_kv_heads, block_size], one layer's views, for a cache in 8
            bits (`kv_quantization`); written beside it.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device. The slots' values are not checked.
    """
    kv = PagedKV(key_cache, value_cache, key_scales, value_scales)
    check_store_kv(key, value, kv, slots)
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    _store_kv_kernel[(num_tokens,)](
        key,
        value,
        *kv,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *kv.strides,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[2],
        MAX_CODE=MAX_CODES.get(key_cache.dtype),
        TILE_H=next_power_of_2(num_kv_heads),
        TILE_D=next_power_of_2(head_dim),
    )


def store_kv_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """`store_kv` token by token in plain torch."""
    block_size = key_cache.shape[2]
    for vectors, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            place = slot // block_size, slice(None), slot % block_size
            if scales is None:
                cache[place] = vectors[token]
            else:
                cache[place], scales[place] = quantize(vectors[token], cache.dtype)
