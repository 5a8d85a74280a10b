"""Attention of one query per sequence over the paged KV cache, by programs with equal shares of all contexts.

Flash-decoding with contexts of any lengths: one kernel attends to what a plan gives each program, a second one merges
the parts of contexts that several programs have read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._attend import (
    LOG2_E,
    LOWEST,
    Pages,
    ScoreRule,
    attend_keys,
    attend_reference,
    launch_options,
    score_parameters,
    tile_dims,
)
from quire_kernels._checks import AttentionRule, PagedKV, check_attention, check_index, require
from quire_kernels._code_pairs import unpacking
from quire_kernels.decode_plan import DecodePlan, decode_tile

# Parts that are merged at once: a constant, so that nothing but a sequence's own parts decides the order of the sums.
TILE_PARTS = 16


@triton.jit(  # type: ignore[untyped-decorator]
    # These differ from step to step: one program must serve them all
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["p_block_tables", "p_context_lens"],
)
def _decode_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_parts,
    p_logs,
    p_starts,
    p_items,
    p_query,
    p_key_cache,
    p_value_cache,
    p_key_scales,
    p_value_scales,
    p_block_tables,
    p_context_lens,
    p_sinks,
    score_scale,
    soft_cap,
    window,
    stride_output_seq,
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
    share = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    # The rows of the tile are the heads of the group: they share each loaded page
    o_row = tl.arange(0, TILE_M)
    o_head = kv_head * GROUP + o_row
    o_dim = tl.arange(0, TILE_D)
    m_query = (o_row < GROUP)[:, None] & (o_dim < HEAD_DIM)[None, :]
    # What could be computed before the loop is not: it would take registers of a third program (sm_90)
    for item in tl.range(tl.load(p_starts + share), tl.load(p_starts + share + 1), disable_licm=True):
        sequence = tl.load(p_items + item * 4).to(tl.int64)
        begin = tl.load(p_items + item * 4 + 1)
        highest = tl.load(p_items + item * 4 + 2)
        is_whole = tl.load(p_items + item * 4 + 3)
        context_len = tl.load(p_context_lens + sequence)
        # [TILE_M, TILE_D]
        o_q = sequence * stride_query_token + o_head[:, None] * stride_query_head + o_dim[None, :]
        b_query = tl.load(p_query + o_q, mask=m_query, other=0.0)
        b_position = tl.full([TILE_M], 0, tl.int32) + (context_len - 1)

        # Items begin with whole tiles; only a sequence's first one may be cut, by the window
        lowest = begin
        full_begin = begin
        if window is not None:
            lowest = tl.maximum(context_len - window, begin)
            full_begin = tl.where(lowest > begin, begin + TILE_N, begin)
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
            # Of parts, the kernel that merges them counts it, once
            m_sink = (o_row < GROUP) & (is_whole != 0)
            b_sink = tl.load(p_sinks + o_head, mask=m_sink, other=float("-inf")) * LOG2_E
        # Of a context of 0 the output is 0
        b_output, b_log = attend_keys(
            b_query,
            b_position,
            pages,
            kv_head,
            lowest,
            highest,
            full_begin,
            highest // TILE_N * TILE_N,
            ScoreRule(score_scale, soft_cap, window),
            b_sink,
            HEAD_DIM,
            BLOCK_SIZE,
            UNPACKING,
            TILE_M,
            TILE_N,
            TILE_D,
        )
        if is_whole != 0:
            # [TILE_M, TILE_D]
            o_out = sequence * stride_output_seq + o_head[:, None] * stride_output_head + o_dim[None, :]
            tl.store(p_output + o_out, b_output.to(p_output.dtype.element_ty), mask=m_query)
        else:
            # Parts are [items, num_heads, head_dim]. [TILE_M, TILE_D]
            o_part = (item * num_heads + o_head).to(tl.int64)
            tl.store(p_parts + o_part[:, None] * HEAD_DIM + o_dim[None, :], b_output, mask=m_query)
            # [TILE_M], where the weights of all parts of a head are comparable
            tl.store(p_logs + o_part, b_log, mask=o_row < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_parts,
    p_logs,
    p_merges,
    p_sinks,
    stride_output_seq,
    stride_output_head,
    HEAD_DIM: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
):
    merge = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    num_parts = tl.load(p_merges + merge * 3 + 2)
    if num_parts == 0:
        return
    sequence = tl.load(p_merges + merge * 3).to(tl.int64)
    first_part = tl.load(p_merges + merge * 3 + 1).to(tl.int64)
    o_dim = tl.arange(0, TILE_D)
    m_dim = o_dim < HEAD_DIM

    if p_sinks is None:
        b_max = LOWEST
        b_sum = 0.0
    else:
        b_max = tl.load(p_sinks + head) * LOG2_E
        b_sum = 1.0
    b_output = tl.zeros([TILE_D], tl.float32)
    for start in range(0, num_parts, TILE_S):
        o_place = start + tl.arange(0, TILE_S)
        m_part = o_place < num_parts
        # [TILE_S]
        o_part = (first_part + o_place) * num_heads + head
        b_log = tl.load(p_logs + o_part, mask=m_part, other=float("-inf"))
        # [TILE_S, TILE_D]
        o_value = o_part[:, None] * HEAD_DIM + o_dim[None, :]
        b_part = tl.load(p_parts + o_value, mask=m_part[:, None] & m_dim[None, :], other=0.0)
        b_new_max = tl.maximum(b_max, tl.max(b_log, axis=0))
        b_weight = tl.exp2(b_log - b_new_max)
        b_decay = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_decay + tl.sum(b_weight, axis=0)
        b_output = b_output * b_decay + tl.sum(b_weight[:, None] * b_part, axis=0)
        b_max = b_new_max
    # [TILE_D]
    o_out = sequence * stride_output_seq + head * stride_output_head + o_dim
    tl.store(p_output + o_out, (b_output / b_sum).to(p_output.dtype.element_ty), mask=m_dim)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest token over its pages, which already hold that token.

    The same as `paged_attention` for sequences of one query, by flash-decoding (pytorch.org/blog/flash-decoding): a
    context may be divided among programs, so that long sequences among short ones keep all of a GPU busy. No launch
    depends on what a tensor holds, so a CUDA graph may be captured, and replayed with other contexts and their plan.

    Args:
        query: [num_seqs, num_heads, head_dim], last dimension contiguous.
        key_cache, value_cache, block_tables, context_lens, scale, window, soft_cap, sinks, key_scales, value_scales:
            see `paged_attention`. A context of 0 gives zeros, for padding rows of a graph.
        plan: of these contexts and this window, by `DecodeSplits.plan`.
        out: what to write to, of the shape of `query`.

    Returns:
        `out`, or else [num_seqs, num_heads, head_dim], contiguous, of the dtype of `query`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride, device or range. What the index tensors hold
            is not checked: that would wait for the GPU.
    """
    kv, rule = PagedKV(key_cache, value_cache, key_scales, value_scales), AttentionRule(scale, window, soft_cap, sinks)
    check_attention(query, kv, block_tables, context_lens, rule, out)
    num_seqs, num_heads, head_dim = query.shape
    require(len(block_tables) == num_seqs, "block_tables", "have a row for each query")
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    tile_m, tile_n, tile_d = decode_tile(group, head_dim, query.dtype)
    check_plan(plan, key_cache, tile_n, window)
    if out is None:
        out = torch.empty((num_seqs, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if num_seqs == 0:
        return out
    num_items, num_merges = len(plan.items), len(plan.merges)
    parts = query.new_empty((num_items if num_merges else 0, num_heads, head_dim), dtype=torch.float32)
    logs = query.new_empty(parts.shape[:2], dtype=torch.float32)
    score_scale, soft_cap = score_parameters(scale, soft_cap)
    _decode_kernel[(plan.splits.num_shares, num_kv_heads)](
        out,
        parts,
        logs,
        plan.starts,
        plan.items,
        query,
        *kv,
        block_tables,
        context_lens,
        sinks,
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
    merge_parts(out, parts, logs, plan.merges, sinks)
    return out


def merge_parts(out: Tensor, parts: Tensor, logs: Tensor, merges: Tensor, sinks: Tensor | None = None) -> None:
    """Writes the output [num_seqs, num_heads, head_dim] of the sequences that `merges` of a plan names.

    `parts` float32 [items, num_heads, head_dim] are the outputs of items, `logs` float32 [items, num_heads] the base-2
    logarithms of their sums of exponentials; both are contiguous. `sinks` are those of `paged_attention`.
    """
    head_dim = out.shape[2]
    if len(merges):
        _merge_kernel[(len(merges), out.shape[1])](
            out,
            parts,
            logs,
            merges,
            sinks,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            TILE_S=TILE_PARTS,
            TILE_D=tile_dims(head_dim),
            num_warps=4,
        )


def check_plan(plan: DecodePlan, key_cache: Tensor, tile_n: int, window: int | None) -> None:
    """The plan must be made for these tiles and this window, and be on the device of the cache."""
    require(plan.splits.window == window, "plan", "be made for the window")
    require(plan.splits.tile_keys == tile_n, "plan", f"be made for tiles of {tile_n} keys")
    check_index(plan.starts, key_cache, (plan.splits.num_shares + 1,), torch.int32, "plan.starts")
    check_index(plan.items, key_cache, (len(plan.items), 4), torch.int32, "plan.items")
    check_index(plan.merges, key_cache, (len(plan.merges), 3), torch.int32, "plan.merges")


def paged_decode_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_decode` sequence by sequence in plain torch, in float32 throughout; the plan has no effect."""
    kv, rule = PagedKV(key_cache, value_cache, key_scales, value_scales), AttentionRule(scale, window, soft_cap, sinks)
    out = torch.empty_like(query) if out is None else out
    for row, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            out[row] = 0.0
        else:
            out[row] = attend_reference(query[row : row + 1], kv, block_tables[row], context_len, rule)[0]
    return out
