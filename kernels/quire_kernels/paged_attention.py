"""Attention of a step's queries over the paged KV cache: prefill chunks and decodes in one launch."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import check_cache, check_heads, check_index, require


@triton.jit  # type: ignore[untyped-decorator]
def _paged_attention_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_query,
    p_key_cache,
    p_value_cache,
    p_block_tables,
    p_query_starts,
    p_context_lens,
    score_scale,
    stride_output_token,
    stride_output_head,
    stride_query_token,
    stride_query_head,
    stride_cache_block,
    stride_cache_head,
    stride_cache_slot,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    query_start = tl.load(p_query_starts + sequence)
    num_queries = tl.load(p_query_starts + sequence + 1) - query_start
    context_len = tl.load(p_context_lens + sequence)

    # The rows of the tile are (query, head of the group) pairs, so that all of them share each page that is loaded.
    QUERIES: tl.constexpr = TILE_M // GROUP
    first_query = tl.program_id(2) * QUERIES
    if first_query >= num_queries:
        return
    o_row = tl.arange(0, TILE_M)
    o_query = first_query + o_row // GROUP
    o_head = kv_head * GROUP + o_row % GROUP
    o_dim = tl.arange(0, TILE_D)
    m_row = (o_row < QUERIES * GROUP) & (o_query < num_queries)
    m_dim = o_dim < HEAD_DIM
    m_query = m_row[:, None] & m_dim[None, :]
    o_token = (query_start + o_query).to(tl.int64)

    # [TILE_M, TILE_D]
    o_q = o_token[:, None] * stride_query_token + o_head[:, None] * stride_query_head + o_dim[None, :]
    b_query = tl.load(p_query + o_q, mask=m_query, other=0.0)
    position = context_len - num_queries + o_query
    # Keys that some query of this tile may see; none beyond is read, so what lies there has no say
    kv_len = tl.minimum(context_len, context_len - num_queries + first_query + QUERIES)

    b_max = tl.full([TILE_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([TILE_M], tl.float32)
    b_output = tl.zeros([TILE_M, TILE_D], tl.float32)
    for start in range(0, kv_len, TILE_N):
        o_kv = start + tl.arange(0, TILE_N)
        m_kv = o_kv < kv_len
        # [TILE_N], 64 bits: a block's stride spans all layers
        b_block = tl.load(p_block_tables + sequence * stride_table + o_kv // BLOCK_SIZE, mask=m_kv, other=0)
        o_slot = b_block.to(tl.int64) * stride_cache_block + o_kv % BLOCK_SIZE * stride_cache_slot
        o_cache = o_slot[:, None] + kv_head * stride_cache_head + o_dim[None, :]
        m_cache = m_kv[:, None] & m_dim[None, :]

        # [TILE_N, TILE_D]
        b_key = tl.load(p_key_cache + o_cache, mask=m_cache, other=0.0)
        # [TILE_M, TILE_N]; key 0 is visible to every row, padding included, so no row's maximum stays -inf
        b_score = tl.dot(b_query, tl.trans(b_key), input_precision="ieee") * score_scale
        m_visible = (o_kv[None, :] <= position[:, None]) & m_kv[None, :]
        b_score = tl.where(m_visible, b_score, float("-inf"))

        # Online softmax, in powers of two
        b_new_max = tl.maximum(b_max, tl.max(b_score, axis=1))
        b_weight = tl.exp2(b_score - b_new_max[:, None])
        b_decay = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_decay + tl.sum(b_weight, axis=1)
        # [TILE_N, TILE_D]; masked as the keys are, because a weight of zero does not silence a NaN
        b_value = tl.load(p_value_cache + o_cache, mask=m_cache, other=0.0)
        b_output = tl.dot(b_weight.to(b_value.dtype), b_value, b_output * b_decay[:, None], input_precision="ieee")
        b_max = b_new_max

    # [TILE_M, TILE_D]
    o_out = o_token[:, None] * stride_output_token + o_head[:, None] * stride_output_head + o_dim[None, :]
    b_output = b_output / b_sum[:, None]
    tl.store(p_output + o_out, b_output.to(p_output.dtype.element_ty), mask=m_query)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over its pages, which already hold those tokens.

    Query i of a sequence with q queries and a context of c tokens sits at position c - q + i and sees the positions
    up to its own. FlashAttention-2 (arXiv:2307.08691) with the pages of PagedAttention (arXiv:2309.06180). Nothing
    beyond a sequence's context is read: neither from its last page nor from its row of the block table.

    Args:
        query: [num_tokens, num_heads, head_dim], the sequences one after another, last dimension contiguous.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], one layer's views of the cache.
        block_tables: int32 [num_seqs, max_blocks], the cache block of each page of each sequence.
        query_starts: int32 [num_seqs + 1], where each sequence begins in `query`, and at last num_tokens.
        context_lens: int32 [num_seqs], tokens in the cache, those of this step included.
        max_query_len: at least the largest number of queries of a sequence.
        scale: what scores are multiplied by before the softmax.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous, of the dtype of `query`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device. What the index tensors hold is
            not checked: that would wait for the GPU.
    """
    _check(query, key_cache, value_cache, block_tables, query_starts, context_lens, max_query_len)
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    output = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return output
    group = num_heads // num_kv_heads
    exact = query.dtype == torch.float32
    tile_d = triton.next_power_of_2(head_dim)
    # tl.dot wants 16 rows at least. A pure decode step needs no more than its group; a prefill's pages serve many rows.
    tile_m = max(16 if max_query_len == 1 else 32 if exact else 64, triton.next_power_of_2(group))
    # A tile of keys takes 16 KiB, so that two pipeline stages of keys and values fit any GPU's shared memory.
    tile_n = max(16, min(64, 16384 // (tile_d * query.element_size())))
    # Float32 products run without tensor cores and spill registers at 4 warps (seen in what ptxas makes for sm_90).
    num_warps = 8 if exact or tile_m * tile_d > 64 * 128 else 4
    _paged_attention_kernel[(block_tables.shape[0], num_kv_heads, triton.cdiv(max_query_len, tile_m // group))](
        output,
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        context_lens,
        scale * math.log2(math.e),
        output.stride(0),
        output.stride(1),
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        block_tables.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_D=tile_d,
        num_warps=num_warps,
        num_stages=2,
    )
    return output


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
) -> Tensor:
    """What `paged_attention` does, sequence by sequence in plain torch, in float32 throughout."""
    group = query.shape[1] // key_cache.shape[1]
    output = torch.empty_like(query)
    starts = query_starts.tolist()
    for table, start, end, context_len in zip(block_tables, starts, starts[1:], context_lens.tolist(), strict=False):
        key = _pages(key_cache, table, context_len).repeat_interleave(group, dim=0)
        value = _pages(value_cache, table, context_len).repeat_interleave(group, dim=0)
        position = torch.arange(context_len, device=query.device)
        hidden = position > position[context_len - (end - start) :, None]
        score = torch.einsum("qhd,hkd->hqk", query[start:end].float(), key) * scale
        weight = score.masked_fill(hidden, float("-inf")).softmax(-1)
        output[start:end] = torch.einsum("hqk,hkd->qhd", weight, value)
    return output


def _pages(cache: Tensor, table: Tensor, context_len: int) -> Tensor:
    """[num_kv_heads, context_len, head_dim] in float32."""
    blocks = table[: -(-context_len // cache.shape[2])].long()
    return cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context_len].float()


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    max_query_len: int,
) -> None:
    check_cache(key_cache, value_cache)
    check_heads(query, key_cache, "query")
    require(query.shape[1] % key_cache.shape[1] == 0, "query", "have a multiple of key_cache's num_kv_heads heads")
    require(block_tables.ndim == 2, "block_tables", "be [num_seqs, max_blocks]")
    num_seqs, max_blocks = block_tables.shape
    check_index(block_tables, key_cache, (num_seqs, max_blocks), torch.int32, "block_tables")
    check_index(query_starts, key_cache, (num_seqs + 1,), torch.int32, "query_starts")
    check_index(context_lens, key_cache, (num_seqs,), torch.int32, "context_lens")
    require(max_query_len >= 1 or query.shape[0] == 0, "max_query_len", "be at least 1")
