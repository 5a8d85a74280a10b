"""Groups the tokens of a step by their experts, in tiles of rows that have one expert each.

A row is one token with one of its experts: row t * num_chosen + i is token t with its expert i. The sizes of all
outputs follow from the number of rows alone, so that the plan can be made on the device, in a captured graph.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import next_power_of_2

# Rows that a program reads at once.
_CHUNK = 1024


class ExpertGroups(NamedTuple):
    """Rows by expert. There are as many tiles as could be needed; those of no expert have the number -1."""

    order: Tensor
    """int32 [num_tiles * tile_rows]: the row in each place of each tile, or -1."""
    tile_experts: Tensor
    """int32 [num_tiles]"""
    tile_rows: int


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])  # type: ignore[untyped-decorator]
def _group_by_expert_kernel(  # type: ignore[no-untyped-def]
    p_order,
    p_tile_experts,
    p_experts,
    num_rows,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # One program for each expert. Every one counts the rows of all, to know where its own tiles begin.
    expert = tl.program_id(0)
    o_expert = tl.arange(0, TILE_EXPERTS)
    b_counts = tl.zeros([TILE_EXPERTS], tl.int32)
    for start in range(0, num_rows, CHUNK):
        o_row = start + tl.arange(0, CHUNK)
        # [CHUNK]; what is beyond the end counts as one more expert's
        b_experts = tl.load(p_experts + o_row, mask=o_row < num_rows, other=NUM_EXPERTS)
        b_counts += tl.histogram(b_experts, TILE_EXPERTS)
    b_tiles = tl.where(o_expert < NUM_EXPERTS, (b_counts + TILE_ROWS - 1) // TILE_ROWS, 0)
    first = tl.sum(tl.where(o_expert < expert, b_tiles, 0))
    end = first + tl.sum(tl.where(o_expert == expert, b_tiles, 0))
    for tile in range(first, end):
        tl.store(p_tile_experts + tile, expert)
    if expert == NUM_EXPERTS - 1:
        for tile in range(end, num_tiles):
            tl.store(p_tile_experts + tile, -1)

    place = first * TILE_ROWS
    for start in range(0, num_rows, CHUNK):
        o_row = start + tl.arange(0, CHUNK)
        b_own = tl.load(p_experts + o_row, mask=o_row < num_rows, other=NUM_EXPERTS) == expert
        b_rank = tl.cumsum(b_own.to(tl.int32), axis=0)
        tl.store(p_order + place + b_rank - 1, o_row, mask=b_own)
        place += tl.sum(b_own.to(tl.int32))
    o_place = place + tl.arange(0, TILE_ROWS)
    tl.store(p_order + o_place, -1, mask=o_place < end * TILE_ROWS)


def group_by_expert(experts: Tensor, num_experts: int, tile_rows: int) -> ExpertGroups:
    """Groups the rows of a step. Nothing here waits for the device.

    Args:
        experts: int32 [num_tokens, num_chosen], contiguous, each below `num_experts`; values are not checked.
        num_experts: of the layer.
        tile_rows: rows of a tile, a power of two.

    Returns:
        The rows of each expert in ascending order, experts in ascending order; a tile's places after the last row of
        its expert hold -1. `order` is not set for tiles of no expert.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype or stride.
    """
    order, tile_experts = _allocate(experts, num_experts, tile_rows)
    if experts.numel():
        _group_by_expert_kernel[(num_experts,)](
            order,
            tile_experts,
            experts,
            experts.numel(),
            len(tile_experts),
            NUM_EXPERTS=num_experts,
            TILE_ROWS=tile_rows,
            # One more than there are experts
            TILE_EXPERTS=next_power_of_2(num_experts + 1),
            CHUNK=_CHUNK,
            num_warps=4,
        )
    return ExpertGroups(order, tile_experts, tile_rows)


def group_by_expert_reference(experts: Tensor, num_experts: int, tile_rows: int) -> ExpertGroups:
    """`group_by_expert` in plain torch; all of `order` is set."""
    order, tile_experts = _allocate(experts, num_experts, tile_rows)
    order.fill_(-1)
    tile_experts.fill_(-1)
    flat, tile = experts.flatten(), 0
    for expert in range(num_experts):
        for rows in torch.split((flat == expert).nonzero().flatten().int(), tile_rows):
            if not len(rows):
                continue
            order[tile * tile_rows : tile * tile_rows + len(rows)] = rows
            tile_experts[tile] = expert
            tile += 1
    return ExpertGroups(order, tile_experts, tile_rows)


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """How many tiles may be needed: every expert that has a row has a tile that is not full."""
    return (num_rows + min(num_rows, num_experts) * (tile_rows - 1)) // tile_rows


def _allocate(experts: Tensor, num_experts: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    require(experts.ndim == 2 and experts.dtype == torch.int32, "experts", "be int32 [num_tokens, num_chosen]")
    require(experts.is_contiguous(), "experts", "be contiguous")
    require(num_experts >= 1, "num_experts", "be at least 1")
    require(tile_rows >= 1 and not tile_rows & (tile_rows - 1), "tile_rows", "be a power of two")
    num_tiles = most_tiles(experts.numel(), num_experts, tile_rows)
    order = torch.empty(num_tiles * tile_rows, dtype=torch.int32, device=experts.device)
    return order, torch.empty(num_tiles, dtype=torch.int32, device=experts.device)
