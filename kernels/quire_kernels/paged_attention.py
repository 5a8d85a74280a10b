"""Attention of a step's queries over the paged KV cache: prefill chunks and decodes in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._attend import (
    LOG2_E,
    Pages,
    ScoreRule,
    attend_keys,
    attend_reference,
    launch_options,
    prefill_tile_keys,
    score_parameters,
    tile_dims,
    tile_keys,
)
from quire_kernels._checks import (
    MAX_HEAD_DIM,
    AttentionRule,
    PagedKV,
    check_attention,
    check_index,
    require,
    wider_heads,
)
from quire_kernels._code_pairs import unpacking
from quire_kernels._shapes import next_power_of_2
from quire_kernels.prefill_tiles import PrefillTiles, count_tiles, prefill_rows


@triton.jit(  # type: ignore[untyped-decorator]
    # These differ from step to step: one program must serve them all
    do_not_specialize=["num_seqs", "stride_table"],
    do_not_specialize_on_alignment=["p_block_tables", "p_query_starts", "p_context_lens", "p_tiles"],
)
def _paged_attention_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_query,
    p_key_cache,
    p_value_cache,
    p_key_scales,
    p_value_scales,
    p_block_tables,
    p_query_starts,
    p_context_lens,
    p_tiles,
    p_sinks,
    num_seqs,
    score_scale,
    soft_cap,
    window,
    stride_output_token,
    stride_output_head,
    stride_query_token,
    stride_query_head,
    stride_cache_block,
    stride_cache_head,
    stride_cache_slot,
    stride_scale_block,
    stride_scale_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNPACKING: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    # The rows of the tile are (query, head of the group) pairs, so that all of them share each page that is loaded.
    QUERIES: tl.constexpr = TILE_M // GROUP
    kv_head = tl.program_id(1)
    sequence, first_query = tile_of_program(p_tiles, p_query_starts, num_seqs, QUERIES)
    query_start = tl.load(p_query_starts + sequence)
    num_queries = tl.load(p_query_starts + sequence + 1) - query_start
    if first_query >= num_queries:
        return
    context_len = tl.load(p_context_lens + sequence)

    o_row = tl.arange(0, TILE_M)
    o_query = first_query + o_row // GROUP
    o_head = kv_head * GROUP + o_row % GROUP
    o_dim = tl.arange(0, TILE_D)
    m_query = ((o_row < QUERIES * GROUP) & (o_query < num_queries))[:, None] & (o_dim < HEAD_DIM)[None, :]
    o_token = (query_start + o_query).to(tl.int64)
    # [TILE_M, TILE_D]
    o_q = o_token[:, None] * stride_query_token + o_head[:, None] * stride_query_head + o_dim[None, :]
    b_query = tl.load(p_query + o_q, mask=m_query, other=0.0)

    first_position = context_len - num_queries + first_query
    b_position = context_len - num_queries + o_query
    # Keys [lowest, highest) are those that some query of this tile may see; all see those of [full_begin, full_end)
    highest = tl.minimum(context_len, first_position + QUERIES)
    full_end = (first_position + 1) // TILE_N * TILE_N
    lowest = 0
    full_begin = 0
    if window is not None:
        lowest = tl.maximum(first_position + 1 - window, 0)
        full_begin = (tl.maximum(highest - window, 0) + TILE_N - 1) // TILE_N * TILE_N

    pages = Pages(
        p_key_cache,
        p_value_cache,
        p_key_scales,
        p_value_scales,
        p_block_tables + sequence * stride_table,
        (stride_cache_block, stride_cache_head, stride_cache_slot),
        (stride_scale_block, stride_scale_head),
    )
    b_sink = None
    if p_sinks is not None:
        b_sink = tl.load(p_sinks + o_head, mask=o_row < QUERIES * GROUP, other=0.0) * LOG2_E
    b_output, _ = attend_keys(
        b_query,
        b_position,
        pages,
        kv_head,
        lowest,
        highest,
        full_begin,
        full_end,
        ScoreRule(score_scale, soft_cap, window),
        b_sink,
        HEAD_DIM,
        BLOCK_SIZE,
        UNPACKING,
        TILE_M,
        TILE_N,
        TILE_D,
    )
    # [TILE_M, TILE_D]
    o_out = o_token[:, None] * stride_output_token + o_head[:, None] * stride_output_head + o_dim[None, :]
    tl.store(p_output + o_out, b_output.to(p_output.dtype.element_ty), mask=m_query)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of_program(p_tiles, p_query_starts, num_seqs, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence and the first query of this program's tile, by the list of a step's tiles if there is one."""
    if p_tiles is not None:
        return tl.load(p_tiles + tl.program_id(0) * 2), tl.load(p_tiles + tl.program_id(0) * 2 + 1)
    else:  # noqa: RET505  Triton wants each return in a branch of its own
        # Backwards: a sequence's last tiles see the most keys, and the longest work starts first
        return find_tile(p_query_starts, num_seqs, tl.num_programs(0) - 1 - tl.program_id(0), QUERIES)


@triton.jit  # type: ignore[untyped-decorator]
def find_tile(p_query_starts, num_seqs, tile, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence that a tile belongs to, and the tile's first query in there, which may lie beyond the last one.

    A sequence's tiles begin at start // QUERIES + sequence. That leaves each sequence all the tiles that it needs, and
    takes num_tokens // QUERIES + num_seqs of them, which the host knows without the starts.
    """
    first_start = tl.load(p_query_starts)
    # The last sequence whose tiles begin at this one or before
    sequence = 0
    beyond = num_seqs
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if (tl.load(p_query_starts + middle) - first_start) // QUERIES + middle <= tile:
            sequence = middle
        else:
            beyond = middle
    first_tile = (tl.load(p_query_starts + sequence) - first_start) // QUERIES + sequence
    return sequence, (tile - first_tile) * QUERIES


def unsupported_heads(*head_dims: int) -> str | None:
    """Why the Triton kernels cannot attend with heads of so many dimensions; None: they can."""
    return wider_heads(max(head_dims), MAX_HEAD_DIM)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
    tiles: PrefillTiles | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over its pages, which already hold those tokens.

    Query i of a sequence with q queries and a context of c tokens sits at position c - q + i and sees the positions
    up to its own. FlashAttention-2 (arXiv:2307.08691) with the pages of PagedAttention (arXiv:2309.06180). Nothing that
    no query sees is read: neither beyond a sequence's context, from its last page and its row of the block table, nor
    before the window of its first query.

    Sequences of one query each run faster through `paged_decode`. Of a batch that begins with those, this takes the
    rest: rows of `block_tables` and `context_lens` from there on, and `query_starts`, which index the whole `query`.

    Args:
        query: [num_tokens, num_heads, head_dim], the sequences one after another, last dimension contiguous.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], one layer's views of the cache, of
            the dtype of `query`, or int8 or float8_e4m3fn with scales.
        block_tables: int32 [num_seqs, max_blocks], the cache block of each page of each sequence.
        query_starts: int32 [num_seqs + 1], where each sequence begins in `query`, and at last where the last one ends.
        context_lens: int32 [num_seqs], tokens in the cache, those of this step included.
        max_query_len: at least the largest number of queries of a sequence. With 1 a program has fewer rows, which may
            change a result's last bits; nothing else of a batch does. Pass 2 or more, or tiles, for the same bits
            always.
        scale: the factor of scores before the softmax.
        window: how many tokens a query sees, itself included; None for all.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap), after the scale and before the mask; None for no cap.
        sinks: float32 [num_heads], one more score for each head, as of a key without a value (arXiv:2309.17453); it is
            neither scaled nor capped, and every query sees it. None for none.
        key_scales, value_scales: float32 [num_blocks, num_kv_heads, block_size], one layer's views, of a cache in 8
            bits (`kv_quantization`).
        out: what to write to, of the shape of `query`; rows that are in no sequence are left as they are.
        tiles: of these sequences, by `plan_tiles`. Without them each program searches for its own in `query_starts`.

    Returns:
        `out`, or else [num_tokens, num_heads, head_dim], contiguous, of the dtype of `query`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride, device or range. What the index tensors hold
            is not checked: that would wait for the GPU.
    """
    kv, rule = PagedKV(key_cache, value_cache, key_scales, value_scales), AttentionRule(scale, window, soft_cap, sinks)
    check_attention(query, kv, block_tables, context_lens, rule, out)
    num_tokens, num_heads, head_dim = query.shape
    num_seqs = len(block_tables)
    check_index(query_starts, key_cache, (num_seqs + 1,), torch.int32, "query_starts")
    require(max_query_len >= 1 or num_tokens == 0, "max_query_len", "be at least 1")
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if num_tokens == 0 or num_seqs == 0:
        return out
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    tile_d = tile_dims(head_dim)
    how = head_dim, query.dtype, key_cache.dtype, query.device
    if max_query_len == 1 and tiles is None:
        # tl.dot wants 16 rows at least. A decode step needs no more than its group.
        tile_m, tile_n = max(16, next_power_of_2(group)), tile_keys(head_dim, query.dtype)
    else:
        tile_m = prefill_rows(group, *how)
        tile_n = prefill_tile_keys(tile_m, *how)
    queries = tile_m // group
    num_tiles, places = count_tiles(tiles, queries, num_tokens, num_seqs, key_cache)
    score_scale, soft_cap = score_parameters(scale, soft_cap)
    _paged_attention_kernel[(num_tiles, num_kv_heads)](
        out,
        query,
        *kv,
        block_tables,
        query_starts,
        context_lens,
        places,
        sinks,
        num_seqs,
        score_scale,
        soft_cap,
        window,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        *kv.strides,
        block_tables.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        UNPACKING=unpacking(query, kv, tile_m),
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_D=tile_d,
        **launch_options(tile_m, tile_n, tile_d, query.dtype, key_cache.dtype, query.device),
    )
    return out


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
    tiles: PrefillTiles | None = None,
) -> Tensor:
    """`paged_attention` sequence by sequence in plain torch, in float32 throughout; the tiles have no effect."""
    kv, rule = PagedKV(key_cache, value_cache, key_scales, value_scales), AttentionRule(scale, window, soft_cap, sinks)
    out = torch.empty_like(query) if out is None else out
    starts = query_starts.tolist()
    for table, start, end, context_len in zip(block_tables, starts, starts[1:], context_lens.tolist(), strict=False):
        out[start:end] = attend_reference(query[start:end], kv, table, context_len, rule)
    return out
