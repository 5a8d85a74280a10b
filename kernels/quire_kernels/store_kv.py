"""Store the keys and values of a step's tokens in the pages of the KV cache."""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import check_store_kv


@triton.jit  # type: ignore[untyped-decorator]
def _store_kv_kernel(  # type: ignore[no-untyped-def]
    p_key,
    p_value,
    p_key_cache,
    p_value_cache,
    p_slots,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cache_block,
    stride_cache_head,
    stride_cache_slot,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + token)
    # All heads of the token in one go: [TILE], the first NUM_KV_HEADS * HEAD_DIM of them real
    o_element = tl.arange(0, TILE)
    o_head = o_element // HEAD_DIM
    o_dim = o_element % HEAD_DIM
    m_element = (o_element < NUM_KV_HEADS * HEAD_DIM) & (slot >= 0)
    # Offsets in 64 bits: a block's stride spans all layers, so a cache soon outgrows 2^31 elements
    o_cache = (
        slot // BLOCK_SIZE * stride_cache_block
        + o_head * stride_cache_head
        + slot % BLOCK_SIZE * stride_cache_slot
        + o_dim
    )
    # [NUM_KV_HEADS, HEAD_DIM]
    b_key = tl.load(p_key + token * stride_key_token + o_head * stride_key_head + o_dim, mask=m_element)
    b_value = tl.load(p_value + token * stride_value_token + o_head * stride_value_head + o_dim, mask=m_element)
    tl.store(p_key_cache + o_cache, b_key, mask=m_element)
    tl.store(p_value_cache + o_cache, b_value, mask=m_element)


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write each token's key and value to its slot of the cache, in place.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], last dimension contiguous.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], one layer's views of the cache.
        slots: int64 [num_tokens], block * block_size + offset in the block, or -1 for a token that is not stored.
            No two tokens may share a slot.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device. The slots' values are not checked.
    """
    check_store_kv(key, value, key_cache, value_cache, slots)
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    _store_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[2],
        TILE=triton.next_power_of_2(num_kv_heads * head_dim),
    )


def store_kv_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """What `store_kv` does, token by token in plain torch."""
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, :, slot % block_size] = key[token]
            value_cache[slot // block_size, :, slot % block_size] = value[token]
