"""Sums over inputs that several programs share, so that few outputs and rows keep a whole GPU busy.

Each program writes its part to memory. The last one of an output's tile adds all parts up, in their order: bits do not
depend on which of them is the last.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TILES = 1 << 14
"""Of the outputs of a launch whose sums are split."""
_MOST_SPLITS = 16
# Programs for each multiprocessor, with which memory is read at the full rate, and the blocks of inputs for which a
# program is worth its start
_PROGRAMS, _LEAST_BLOCKS = 2, 2


@triton.jit  # type: ignore[untyped-decorator]
def add_splits(  # type: ignore[no-untyped-def]
    b_sum, p_parts, p_arrivals, tile, split, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The sum of all parts [ROWS, COLUMNS] of a tile, and whether this program is the last of it, which has it."""
    o_part = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    p_tile = p_parts + tile.to(tl.int64) * (SPLITS * ROWS * COLUMNS) + o_part
    tl.store(p_tile + split * (ROWS * COLUMNS), b_sum)
    # All threads of the program have written before one of them says so.
    tl.debug_barrier()
    is_last = tl.atomic_add(p_arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(p_arrivals + tile, 0)  # for the next launch
        b_sum = tl.zeros([ROWS, COLUMNS], b_sum.dtype)
        for part in range(SPLITS):
            # Not from a multiprocessor's own cache, which may lack what others wrote
            b_sum += tl.load(p_tile + part * (ROWS * COLUMNS), cache_modifier=".cg")
    return b_sum, is_last


def choose_splits(num_tiles: int, num_blocks: int, multiprocessors: int) -> int:
    """How many programs, a power of two, share the sums of each of so many tiles of outputs over so many blocks of
    inputs. Tiles that occupy all multiprocessors are not split: that took a fifth longer (H200, 4096 to 28672).
    """
    if num_tiles >= multiprocessors:
        return 1
    splits = 1
    while (
        splits < _MOST_SPLITS
        and splits * num_tiles < _PROGRAMS * multiprocessors
        and 2 * splits * _LEAST_BLOCKS <= num_blocks
    ):
        splits *= 2
    return splits


@cache
def arrivals(device: torch.device) -> Tensor:
    """int32 [MOST_TILES], for each tile how many of its programs have arrived: 0 between launches. For launches of one
    stream, which runs them one after another.
    """
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
