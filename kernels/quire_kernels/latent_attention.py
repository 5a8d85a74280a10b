"""Attention of a step's queries over pages of latent vectors: prefill chunks and decodes in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._attend_latent import (
    LatentPages,
    attend_latents,
    attend_latents_reference,
    check_latents,
    latent_score_scale,
    latent_tile,
)
from quire_kernels._checks import check_index
from quire_kernels._shapes import ceil_div
from quire_kernels.paged_attention import tile_of_program
from quire_kernels.prefill_tiles import PrefillTiles, count_tiles

_MOST_ROWS = 32  # of a tile


@triton.jit(  # type: ignore[untyped-decorator]
    # These differ from step to step: one program must serve them all
    do_not_specialize=["num_seqs", "stride_table"],
    do_not_specialize_on_alignment=["p_block_tables", "p_query_starts", "p_context_lens", "p_tiles"],
)
def _latent_attention_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_query,
    p_cache,
    p_scales,
    p_block_tables,
    p_query_starts,
    p_context_lens,
    p_tiles,
    num_seqs,
    score_scale,
    stride_output_token,
    stride_output_head,
    stride_query_token,
    stride_query_head,
    stride_cache_block,
    stride_cache_slot,
    stride_scale_block,
    stride_table,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_CODE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_P: tl.constexpr,
):
    # The rows of the tile are (query, head) pairs, so that all of them share each page that is loaded.
    QUERIES: tl.constexpr = TILE_M // GROUP
    sequence, first_query = tile_of_program(p_tiles, p_query_starts, num_seqs, QUERIES)
    query_start = tl.load(p_query_starts + sequence)
    num_queries = tl.load(p_query_starts + sequence + 1) - query_start
    if first_query >= num_queries:
        return
    context_len = tl.load(p_context_lens + sequence)

    o_row = tl.arange(0, TILE_M)
    o_query = first_query + o_row // GROUP
    o_head = tl.program_id(1) * GROUP + o_row % GROUP
    m_row = (o_row < QUERIES * GROUP) & (o_query < num_queries) & (o_head < NUM_HEADS)
    o_rank = tl.arange(0, TILE_R)
    o_rotated = tl.arange(0, TILE_P)
    m_rank = m_row[:, None] & (o_rank < RANK)[None, :]
    m_rotated = m_row[:, None] & (o_rotated < ROTATED)[None, :]
    o_token = (query_start + o_query).to(tl.int64)
    # [TILE_M, TILE_R], [TILE_M, TILE_P]
    p_row = p_query + (o_token * stride_query_token + o_head * stride_query_head)[:, None]
    b_query = tl.load(p_row + o_rank[None, :], mask=m_rank, other=0.0)
    b_rotated = tl.load(p_row + RANK + o_rotated[None, :], mask=m_rotated, other=0.0)

    first_position = context_len - num_queries + first_query
    b_output, _ = attend_latents(
        b_query,
        b_rotated,
        context_len - num_queries + o_query,
        LatentPages(
            p_cache,
            p_scales,
            p_block_tables + sequence.to(tl.int64) * stride_table,
            stride_cache_block,
            stride_cache_slot,
            stride_scale_block,
        ),
        0,
        tl.minimum(context_len, first_position + QUERIES),
        (first_position + 1) // TILE_N * TILE_N,
        score_scale,
        RANK,
        ROTATED,
        BLOCK_SIZE,
        MAX_CODE,
        TILE_M,
        TILE_N,
        TILE_R,
        TILE_P,
    )
    # [TILE_M, TILE_R]
    o_out = (o_token * stride_output_token + o_head * stride_output_head)[:, None] + o_rank[None, :]
    tl.store(p_output + o_out, b_output.to(p_output.dtype.element_ty), mask=m_rank)


def latent_attention(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    rank: int,
    scale: float,
    *,
    key_scales: Tensor | None = None,
    out: Tensor | None = None,
    tiles: PrefillTiles | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over its pages, which already hold those tokens.

    Query i of a sequence with q queries and a context of c tokens sits at position c - q + i and sees the positions up
    to its own. The bits of a query's output depend on its sequence alone, and not on the chunk that it is computed in.

    Sequences of one query each run faster through `latent_decode`. Of a batch that begins with those, this takes the
    rest: rows of `block_tables` and `context_lens` from there on, and `query_starts`, which index the whole `query`.

    Args:
        query: [num_tokens, num_heads, rank + rotated dimensions], the sequences one after another, last dimension
            contiguous: of each head the query times the product for keys, then its rotated part.
        key_cache: [num_blocks, 1, block_size, rank + rotated dimensions], one layer's view, of the dtype of `query`, or
            int8 or float8_e4m3fn with scales: latent vectors, and rotated keys behind them.
        block_tables: int32 [num_seqs, max_blocks], the cache block of each page of each sequence.
        query_starts: int32 [num_seqs + 1], where each sequence begins in `query`, and at last where the last one ends.
        context_lens: int32 [num_seqs], tokens in the cache, those of this step included.
        rank: dimensions of the latent vector, at most 512.
        scale: the factor of scores before the softmax.
        key_scales: float32 [num_blocks, 1, block_size], one layer's view, of a cache in 8 bits (`kv_quantization`).
        out: what to write to; rows that are in no sequence are left as they are.
        tiles: of these sequences, by `plan_tiles`. Without them each program searches for its own in `query_starts`.

    Returns:
        `out`, or else [num_tokens, num_heads, rank], contiguous, of the dtype of `query`: weighted means of latent
        vectors.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride, device or range. What the index tensors hold
            is not checked: that would wait for the GPU.
    """
    check_latents(query, key_cache, key_scales, block_tables, context_lens, rank, scale, out)
    (num_tokens, num_heads, width), num_seqs = query.shape, len(block_tables)
    check_index(query_starts, key_cache, (num_seqs + 1,), torch.int32, "query_starts")
    if out is None:
        out = torch.empty((num_tokens, num_heads, rank), dtype=query.dtype, device=query.device)
    if num_tokens == 0 or num_seqs == 0:
        return out
    tile = latent_tile(num_heads, _MOST_ROWS, rank, width - rank, query.dtype, key_cache.dtype, query.device)
    num_tiles, places = count_tiles(tiles, tile.queries, num_tokens, num_seqs, key_cache)
    _latent_attention_kernel[(num_tiles, ceil_div(num_heads, tile.num_heads))](
        out,
        query,
        key_cache,
        key_scales,
        block_tables,
        query_starts,
        context_lens,
        places,
        num_seqs,
        latent_score_scale(scale),
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(2),
        0 if key_scales is None else key_scales.stride(0),
        block_tables.stride(0),
        **tile.launch_options(query, key_cache, rank),
    )
    return out


def latent_queries_per_tile(
    num_heads: int, rank: int, rotated: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> int:
    """How many queries of a sequence a program computes, for all heads of its tile."""
    return latent_tile(num_heads, _MOST_ROWS, rank, rotated, dtype, cache_dtype, device).queries


def latent_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    rank: int,
    scale: float,
    *,
    key_scales: Tensor | None = None,
    out: Tensor | None = None,
    tiles: PrefillTiles | None = None,
) -> Tensor:
    """`latent_attention` sequence by sequence in plain torch, in float32 throughout; the tiles have no effect."""
    out = query.new_empty(*query.shape[:2], rank) if out is None else out
    starts = query_starts.tolist()
    for table, start, end, context_len in zip(block_tables, starts, starts[1:], context_lens.tolist(), strict=False):
        out[start:end] = attend_latents_reference(
            query[start:end], key_cache, key_scales, table, context_len, rank, scale
        )
    return out
