"""Attention of one query per sequence over the paged KV cache, each context split among several programs.

Flash-decoding: one kernel attends to the parts of a context, a second one merges what they gathered.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._attend import (
    LOWEST,
    Pages,
    ScoreRule,
    attend_keys,
    attend_reference,
    launch_options,
    score_parameters,
    tile_dims,
    tile_keys,
)
from quire_kernels._checks import AttentionRule, PagedKV, check_attention, require
from quire_kernels._device import device_limits
from quire_kernels.kv_quantization import MAX_CODES

# A split's output is float32 and written once and read once: from 256 keys on, that is little beside its keys.
MIN_KEYS_PER_SPLIT = 256
MAX_SPLITS = 128
# Each has up to two tiles of keys and values in flight, 64 KiB; to hide about 1 µs of memory latency at 4.3 TB/s, each
# of an H200's 132 multiprocessors needs some 33 KB in flight.
PROGRAMS_PER_MULTIPROCESSOR = 2
# The largest tile of keys: a fixed split is a multiple of it, so that no tile is in two splits.
SPLIT_GRAIN = 128
# Splits that are merged at once: a constant, so that nothing but a sequence's own splits decides the order of the sums.
TILE_SPLITS = 16


@lru_cache(maxsize=1024)  # every layer of a step asks the same
def choose_num_splits(num_seqs: int, num_kv_heads: int, max_context_len: int, multiprocessors: int) -> int:
    """The fewest splits that keep the multiprocessors nearly as busy as the best number would.

    Programs run in waves of as many as fit the device; the last wave leaves some of it idle. After FlashAttention's
    `num_splits_heuristic` (csrc/flash_attn/flash_api.cpp), which accepts 85 % of the best.
    """
    wave = multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    most = max(1, min(MAX_SPLITS, triton.cdiv(max_context_len, MIN_KEYS_PER_SPLIT)))
    busy = []
    for num_splits in range(1, most + 1):
        num_programs = num_seqs * num_kv_heads * num_splits
        busy.append(num_programs / (triton.cdiv(num_programs, wave) * wave))
    return next(n for n, share in enumerate(busy, start=1) if share >= 0.85 * max(busy))


@triton.jit  # type: ignore[untyped-decorator]
def _split(  # type: ignore[no-untyped-def]
    context_len, window, num_splits, keys_per_split, MIN_KEYS: tl.constexpr, TILE_N: tl.constexpr
):
    """How a sequence is split: its first key, the first tile's start, keys in a split, and splits with keys in them."""
    lowest = 0
    if window is not None:
        lowest = tl.maximum(context_len - window, 0)
    first = lowest // TILE_N * TILE_N
    if keys_per_split is None:
        share = tl.cdiv(tl.cdiv(context_len - first, num_splits), TILE_N) * TILE_N
        keys_per_split = tl.maximum(share, MIN_KEYS)
    return lowest, first, keys_per_split, tl.cdiv(context_len - first, keys_per_split)


@triton.jit(  # type: ignore[untyped-decorator]
    # These differ from step to step: one program must serve them all
    do_not_specialize=["stride_table", "stride_output_seq", "stride_output_head"],
    do_not_specialize_on_alignment=["p_query", "p_block_tables", "p_context_lens"],
)
def _decode_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_logs,  # None: there is one split, and the output is the final one
    p_query,
    p_key_cache,
    p_value_cache,
    p_key_scales,
    p_value_scales,
    p_block_tables,
    p_context_lens,
    score_scale,
    soft_cap,
    window,
    keys_per_split,
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
    MAX_CODE: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    context_len = tl.load(p_context_lens + sequence)
    lowest, first, keys_per_split, used_splits = _split(
        context_len, window, num_splits, keys_per_split, MIN_KEYS, TILE_N
    )
    # The first split of an empty sequence goes on, to write zeros
    if split > 0 and split >= used_splits:
        return
    begin = first + split * keys_per_split
    highest = tl.minimum(begin + keys_per_split, context_len)

    # The rows of the tile are the heads of the group: they share each loaded page
    o_row = tl.arange(0, TILE_M)
    o_head = kv_head * GROUP + o_row
    o_dim = tl.arange(0, TILE_D)
    m_query = (o_row < GROUP)[:, None] & (o_dim < HEAD_DIM)[None, :]
    # [TILE_M, TILE_D]
    o_q = sequence * stride_query_token + o_head[:, None] * stride_query_head + o_dim[None, :]
    b_query = tl.load(p_query + o_q, mask=m_query, other=0.0)
    b_position = tl.full([TILE_M], 0, tl.int32) + (context_len - 1)

    # Splits begin with whole tiles; only the first one's first tile may be cut, by the window
    full_begin = begin
    if window is not None:
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
    b_output, b_log = attend_keys(
        b_query,
        b_position,
        pages,
        kv_head,
        tl.maximum(lowest, begin),
        highest,
        full_begin,
        highest // TILE_N * TILE_N,
        ScoreRule(score_scale, soft_cap, window),
        HEAD_DIM,
        BLOCK_SIZE,
        MAX_CODE,
        TILE_M,
        TILE_N,
        TILE_D,
    )
    # [TILE_M, TILE_D]; partial outputs are [num_seqs, num_heads, num_splits, head_dim]
    o_out = sequence * stride_output_seq + o_head[:, None] * stride_output_head + o_dim[None, :]
    if p_logs is not None:
        o_out += split * HEAD_DIM
        # [TILE_M], where the weights of all splits of a head are comparable
        o_log = (sequence * tl.num_programs(1) * GROUP + o_head) * num_splits + split
        tl.store(p_logs + o_log, b_log, mask=o_row < GROUP)
    tl.store(p_output + o_out, b_output.to(p_output.dtype.element_ty), mask=m_query)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["p_context_lens"]
)
def _merge_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_parts,
    p_logs,
    p_context_lens,
    num_splits,
    window,
    keys_per_split,
    stride_output_token,
    stride_output_head,
    HEAD_DIM: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context_len = tl.load(p_context_lens + sequence)
    _, _, _, used_splits = _split(context_len, window, num_splits, keys_per_split, MIN_KEYS, TILE_N)
    used_splits = tl.maximum(used_splits, 1)
    o_dim = tl.arange(0, TILE_D)
    m_dim = o_dim < HEAD_DIM
    first_part = (sequence * tl.num_programs(1) + head) * num_splits

    b_max = LOWEST
    b_sum = 0.0
    b_output = tl.zeros([TILE_D], tl.float32)
    for start in range(0, used_splits, TILE_S):
        o_split = start + tl.arange(0, TILE_S)
        m_split = o_split < used_splits
        # [TILE_S]
        b_log = tl.load(p_logs + first_part + o_split, mask=m_split, other=float("-inf"))
        # [TILE_S, TILE_D]
        o_part = (first_part + o_split)[:, None] * HEAD_DIM + o_dim[None, :]
        b_part = tl.load(p_parts + o_part, mask=m_split[:, None] & m_dim[None, :], other=0.0)
        b_new_max = tl.maximum(b_max, tl.max(b_log, axis=0))
        b_weight = tl.exp2(b_log - b_new_max)
        b_decay = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_decay + tl.sum(b_weight, axis=0)
        b_output = b_output * b_decay + tl.sum(b_weight[:, None] * b_part, axis=0)
        b_max = b_new_max
    # [TILE_D]
    o_out = sequence * stride_output_token + head * stride_output_head + o_dim
    tl.store(p_output + o_out, (b_output / b_sum).to(p_output.dtype.element_ty), mask=m_dim)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    keys_per_split: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest token over its pages, which already hold that token.

    The same as `paged_attention` for sequences of one query, by flash-decoding (pytorch.org/blog/flash-decoding): each
    context is split among programs, so that few long sequences keep all of a GPU busy. No launch depends on what a
    tensor holds, so a CUDA graph may be captured with the largest context it will see.

    Args:
        query: [num_seqs, num_heads, head_dim], last dimension contiguous.
        key_cache, value_cache, block_tables, context_lens, scale, window, soft_cap, key_scales, value_scales:
            see `paged_attention`. A context of 0 gives zeros, for padding rows of a graph.
        max_context_len: at least the largest context.
        keys_per_split: None to split each context evenly, into a number that depends on the batch; or the keys of each
            split, a multiple of 128, so that a sequence's result depends on nothing but itself. A launch then counts
            max_context_len / keys_per_split programs for each sequence and KV head.
        out: what to write to, of the shape of `query`.

    Returns:
        `out`, or else [num_seqs, num_heads, head_dim], contiguous, of the dtype of `query`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride, device or range. What the index tensors hold
            is not checked: that would wait for the GPU.
    """
    kv, rule = PagedKV(key_cache, value_cache, key_scales, value_scales), AttentionRule(scale, window, soft_cap)
    check_attention(query, kv, block_tables, context_lens, rule, out)
    num_seqs, num_heads, head_dim = query.shape
    require(len(block_tables) == num_seqs, "block_tables", "have a row for each query")
    require(max_context_len >= 1, "max_context_len", "be at least 1")
    require(
        keys_per_split is None or (keys_per_split >= 1 and keys_per_split % SPLIT_GRAIN == 0),
        "keys_per_split",
        f"be a positive multiple of {SPLIT_GRAIN}",
    )
    if out is None:
        out = torch.empty((num_seqs, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if num_seqs == 0:
        return out
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    tile_d = tile_dims(head_dim)
    tile_m = max(16, triton.next_power_of_2(group))  # tl.dot wants 16 rows at least
    tile_n = tile_keys(head_dim, query.dtype)
    # A window begins anywhere in its first tile
    max_keys = max_context_len if window is None else min(max_context_len, window + tile_n)
    if keys_per_split is None:
        multiprocessors = device_limits(query.device).multiprocessors
        num_splits = choose_num_splits(num_seqs, num_kv_heads, max_keys, multiprocessors)
    else:
        num_splits = triton.cdiv(max_keys, keys_per_split)
    parts, logs = out, None
    if num_splits > 1:
        parts = query.new_empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32)
        logs = query.new_empty((num_seqs, num_heads, num_splits), dtype=torch.float32)
    score_scale, soft_cap = score_parameters(scale, soft_cap)
    _decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        parts,
        logs,
        query,
        *kv,
        block_tables,
        context_lens,
        score_scale,
        soft_cap,
        window,
        keys_per_split,
        parts.stride(0),
        parts.stride(1),
        query.stride(0),
        query.stride(1),
        *kv.strides,
        block_tables.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        MAX_CODE=MAX_CODES.get(key_cache.dtype),
        MIN_KEYS=MIN_KEYS_PER_SPLIT,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_D=tile_d,
        **launch_options(tile_m, tile_n, tile_d, query.dtype, key_cache.dtype, query.device),
    )
    if logs is not None:
        _merge_kernel[(num_seqs, num_heads)](
            out,
            parts,
            logs,
            context_lens,
            num_splits,
            window,
            keys_per_split,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            MIN_KEYS=MIN_KEYS_PER_SPLIT,
            TILE_S=TILE_SPLITS,
            TILE_N=tile_n,
            TILE_D=tile_d,
            num_warps=4,
        )
    return out


def paged_decode_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    keys_per_split: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_decode` sequence by sequence in plain torch, in float32 throughout."""
    kv, rule = PagedKV(key_cache, value_cache, key_scales, value_scales), AttentionRule(scale, window, soft_cap)
    out = torch.empty_like(query) if out is None else out
    for row, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            out[row] = 0.0
        else:
            out[row] = attend_reference(query[row : row + 1], kv, block_tables[row], context_len, rule)[0]
    return out
