"""Attention of one query per sequence over pages of latent vectors, by programs with equal shares of all contexts.

The same division as in `paged_decode`, by the same plans.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._attend_latent import (
    OTHER_SHARED_BYTES,
    LatentPages,
    LatentTile,
    attend_latents,
    attend_latents_reference,
    check_latents,
    latent_row_bytes,
    latent_score_scale,
    latent_tile,
)
from quire_kernels._checks import require
from quire_kernels._device import device_limits
from quire_kernels._shapes import ceil_div
from quire_kernels.decode_plan import INTERPRETED_PROGRAMS, DecodePlan, DecodeSplits
from quire_kernels.paged_decode import check_plan, merge_parts

# Of a thread: an upper bound of what the kernel takes on every target, which `make aot` checks.
_REGISTERS = 255


@triton.jit(  # type: ignore[untyped-decorator]
    # These differ from step to step: one program must serve them all
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["p_block_tables", "p_context_lens"],
)
def _latent_decode_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_parts,
    p_logs,
    p_starts,
    p_items,
    p_query,
    p_cache,
    p_scales,
    p_block_tables,
    p_context_lens,
    score_scale,
    stride_output_seq,
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
    share = tl.program_id(0)
    # The rows of the tile are heads: they share each loaded page
    o_row = tl.arange(0, TILE_M)
    o_head = tl.program_id(1) * GROUP + o_row
    m_row = (o_row < GROUP) & (o_head < NUM_HEADS)
    o_rank = tl.arange(0, TILE_R)
    o_rotated = tl.arange(0, TILE_P)
    m_rank = m_row[:, None] & (o_rank < RANK)[None, :]
    m_rotated = m_row[:, None] & (o_rotated < ROTATED)[None, :]
    # As in `paged_decode`: what could be computed before the loop would take registers in it
    for item in tl.range(tl.load(p_starts + share), tl.load(p_starts + share + 1), disable_licm=True):
        sequence = tl.load(p_items + item * 4).to(tl.int64)
        begin = tl.load(p_items + item * 4 + 1)
        highest = tl.load(p_items + item * 4 + 2)
        is_whole = tl.load(p_items + item * 4 + 3)
        context_len = tl.load(p_context_lens + sequence)
        # [TILE_M, TILE_R], [TILE_M, TILE_P]
        p_row = p_query + (sequence * stride_query_token + o_head * stride_query_head)[:, None]
        b_query = tl.load(p_row + o_rank[None, :], mask=m_rank, other=0.0)
        b_rotated = tl.load(p_row + RANK + o_rotated[None, :], mask=m_rotated, other=0.0)
        # Of a context of 0 the output is 0
        b_output, b_log = attend_latents(
            b_query,
            b_rotated,
            tl.full([TILE_M], 0, tl.int32) + (context_len - 1),
            LatentPages(
                p_cache,
                p_scales,
                p_block_tables + sequence * stride_table,
                stride_cache_block,
                stride_cache_slot,
                stride_scale_block,
            ),
            begin,
            highest,
            highest // TILE_N * TILE_N,
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
        if is_whole != 0:
            # [TILE_M, TILE_R]
            o_out = sequence * stride_output_seq + o_head[:, None] * stride_output_head + o_rank[None, :]
            tl.store(p_output + o_out, b_output.to(p_output.dtype.element_ty), mask=m_rank)
        else:
            # Parts are [items, num_heads, rank]. [TILE_M, TILE_R]
            o_part = (item * NUM_HEADS + o_head).to(tl.int64)
            tl.store(p_parts + o_part[:, None] * RANK + o_rank[None, :], b_output, mask=m_rank)
            # [TILE_M], where the weights of all parts of a head are comparable
            tl.store(p_logs + o_part, b_log, mask=m_row)


def latent_decode(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    plan: DecodePlan,
    rank: int,
    scale: float,
    *,
    key_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest token over its pages, which already hold that token.

    The same as `latent_attention` for sequences of one query, by flash-decoding: see `paged_decode`.

    Args:
        query: [num_seqs, num_heads, rank + rotated dimensions], last dimension contiguous.
        key_cache, block_tables, context_lens, rank, scale, key_scales: see `latent_attention`. A context of 0 gives
            zeros, for padding rows of a graph.
        plan: of these contexts, by `DecodeSplits.plan` of `latent_splits`.
        out: what to write to.

    Returns:
        `out`, or else [num_seqs, num_heads, rank], contiguous, of the dtype of `query`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride, device or range. What the index tensors hold
            is not checked: that would wait for the GPU.
    """
    check_latents(query, key_cache, key_scales, block_tables, context_lens, rank, scale, out)
    num_seqs, num_heads, width = query.shape
    require(len(block_tables) == num_seqs, "block_tables", "have a row for each query")
    tile = _decode_tile(num_heads, rank, width - rank, query.dtype, key_cache.dtype, query.device)
    check_plan(plan, key_cache, tile.keys, None)
    if out is None:
        out = torch.empty((num_seqs, num_heads, rank), dtype=query.dtype, device=query.device)
    if num_seqs == 0:
        return out
    parts = query.new_empty((len(plan.items) if len(plan.merges) else 0, num_heads, rank), dtype=torch.float32)
    logs = query.new_empty(parts.shape[:2], dtype=torch.float32)
    _latent_decode_kernel[(plan.splits.num_shares, ceil_div(num_heads, tile.num_heads))](
        out,
        parts,
        logs,
        plan.starts,
        plan.items,
        query,
        key_cache,
        key_scales,
        block_tables,
        context_lens,
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
    merge_parts(out, parts, logs, plan.merges)
    return out


def latent_splits(
    num_heads: int, rank: int, rotated: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> DecodeSplits:
    """Splits for as many programs of `latent_decode` as run on the device at the same time."""
    tile = _decode_tile(num_heads, rank, rotated, dtype, cache_dtype, device)
    programs = INTERPRETED_PROGRAMS
    if device.type != "cpu":
        programs = device_limits(device).multiprocessors * _resident_programs(tile, dtype, cache_dtype, device)
    return DecodeSplits(max(1, programs // ceil_div(num_heads, tile.num_heads)), tile.keys)


def _decode_tile(
    num_heads: int, rank: int, rotated: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> LatentTile:
    return latent_tile(num_heads, num_heads, rank, rotated, dtype, cache_dtype, device)


def _resident_programs(tile: LatentTile, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device) -> int:
    """How many programs a multiprocessor runs at the same time. If fewer ran than this says, those that wait would
    take as long again; one too few costs little.
    """
    limits, width = device_limits(device), tile.rank + tile.rotated
    num_tiles = 2 if tile.options["num_stages"] == 5 else 1
    loaded = num_tiles * tile.keys * latent_row_bytes(width, dtype, cache_dtype)
    shared = tile.rows * (width + tile.keys) * dtype.itemsize + loaded + OTHER_SHARED_BYTES
    threads = tile.options["num_warps"] * limits.warp_size
    return max(1, min(limits.shared_memory // shared, limits.registers // (_REGISTERS * threads)))


def latent_decode_reference(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    plan: DecodePlan,
    rank: int,
    scale: float,
    *,
    key_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`latent_decode` sequence by sequence in plain torch, in float32 throughout; the plan has no effect."""
    out = query.new_empty(*query.shape[:2], rank) if out is None else out
    for row, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            out[row] = 0.0
        else:
            one = query[row : row + 1], key_cache, key_scales, block_tables[row]
            out[row] = attend_latents_reference(*one, context_len, rank, scale)[0]
    return out
