"""Which program of a decode reads which keys. One plan is made for each step, on the host, for all layers of a window.

The tiles of keys of all sequences stand in one row, which is cut into shares of equal cost, one for each program that a
KV head has on the device. A share may end within a sequence: that sequence's parts are merged afterwards. After the
"stream-K" decomposition of matrix products (Osama et al., 2023, arXiv:2301.03598).
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels._attend import launch_options, tile_dims, tile_keys
from quire_kernels._checks import require
from quire_kernels._device import device_limits
from quire_kernels._shapes import next_power_of_2

Ints = NDArray[np.int32]

ITEM_TILES = 1
"""What a program pays for an item besides its tiles, in tiles: it waits for the item, the query and the first keys."""
MIN_KEYS_PER_SHARE = 256
"""A part's output is float32, written once and read once. From as many keys on, that is little beside its keys."""
SPLIT_GRAIN = 128
"""The largest tile of keys: a fixed split is a multiple of it, so that no tile is in two splits."""

# What the decode kernel takes: bytes of shared memory besides tiles and queries, and registers of a thread, usually and
# at most. Some kernels take more registers, but shared memory limits these to fewer programs: `make aot` fails where
# the programs of a plan do not all run at once.
_OTHER_SHARED_BYTES = 2048
_REGISTERS, _MOST_REGISTERS, _FP32_REGISTERS = 168, 255, 80
# Of each program on NVIDIA's GPUs, beside its own
_RESERVED_SHARED_BYTES = 1024
INTERPRETED_PROGRAMS = 8
"""The interpreter runs programs one after another: more of them would only take longer."""


class PlanArrays(NamedTuple):
    """A plan on the host, int32. Its shapes depend on the number of sequences only, unless splits are fixed."""

    starts: Ints
    """[num_shares + 1], the first item of each share; the last entry is the number of items."""
    items: Ints
    """[items, 4]: a sequence, the first key of the first tile, the end of the keys, and 1 if that is all of the
    sequence. Every sequence has at least one, in order; what lies beyond the number of items means nothing."""
    merges: Ints
    """[merges, 3]: a sequence of several items, its first item, and their number; the rest is filled with zeros."""


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """How the contexts of decodes are divided among `num_shares` programs of each KV head."""

    num_shares: int
    tile_keys: int
    window: int | None = None
    keys_per_split: int | None = None
    """None: where shares end; or after so many keys, so that a sequence's parts depend on nothing but itself."""

    def __post_init__(self) -> None:
        """Raises ValueError if a field, which it names, is out of its range."""
        require(self.num_shares >= 1, "num_shares", "be at least 1")
        require(self.window is None or self.window >= 1, "window", "be at least 1")
        require(
            self.keys_per_split is None or (self.keys_per_split >= 1 and self.keys_per_split % SPLIT_GRAIN == 0),
            "keys_per_split",
            f"be a positive multiple of {SPLIT_GRAIN}",
        )

    def plan(self, context_lens: Ints) -> PlanArrays:
        """The plan of a step whose sequences, at least one, have contexts of these lengths, 0 for padding."""
        contexts = context_lens.astype(np.int64)
        num_seqs, tile = len(contexts), self.tile_keys
        # Keys before the window are not read, except for those of its first tile.
        first_tiles = np.zeros_like(contexts) if self.window is None else (contexts - self.window).clip(0) // tile
        num_tiles = -(-contexts // tile) - first_tiles
        # Where each sequence ends and begins in the row of all tiles. An item's start is a part of its length.
        ends = (num_tiles + ITEM_TILES).cumsum()
        begins = ends - num_tiles - ITEM_TILES
        share = max(-(-int(ends[-1]) // self.num_shares), ITEM_TILES + -(-MIN_KEYS_PER_SHARE // tile))
        share_ends = np.arange(share, int(ends[-1]), share)
        if self.keys_per_split is None:
            cut_seqs, cut_tiles = _cuts_at(share_ends, begins, ends)
        else:
            cut_seqs, cut_tiles = _cuts_every(self.keys_per_split // tile, num_tiles)
        num_items = num_seqs + len(cut_seqs)

        sequences = np.concatenate([np.arange(num_seqs), cut_seqs])
        tiles = np.concatenate([np.zeros(num_seqs, np.int64), cut_tiles])
        order = np.lexsort((tiles, sequences))
        sequences, tiles = sequences[order], tiles[order]
        counts = np.bincount(sequences)
        first_items = counts.cumsum() - counts
        # An item ends where the next one begins, the last one of a sequence with its context.
        end_tiles = np.append(tiles[1:], 0)
        end_tiles[first_items + counts - 1] = num_tiles
        split = np.flatnonzero(counts > 1)

        plan = self._empty(num_seqs, num_items)
        plan.starts[1:] = num_items
        # The first item that begins at the end of the share before, or after it
        plan.starts[1 : len(share_ends) + 1] = np.searchsorted(begins[sequences] + ITEM_TILES + tiles, share_ends)
        items = plan.items[:num_items]
        items[:, 0] = sequences
        items[:, 1] = (first_tiles[sequences] + tiles) * tile
        items[:, 2] = np.minimum((first_tiles[sequences] + end_tiles) * tile, contexts[sequences])
        items[:, 3] = counts[sequences] == 1
        plan.merges[: len(split)] = np.stack([split, first_items[split], counts[split]], axis=1)
        return plan

    def num_bytes(self, num_seqs: int) -> int:
        """Of the plan of so many sequences, if splits are not fixed."""
        return sum(array.nbytes for array in self._empty(num_seqs, 0))

    def _empty(self, num_seqs: int, num_items: int) -> PlanArrays:
        if self.keys_per_split is None:
            # At most one cut for each end of a share but the last one
            num_items = num_seqs + self.num_shares - 1
        num_merges = num_seqs if self.keys_per_split is not None else min(num_seqs, self.num_shares - 1)
        return PlanArrays(
            np.zeros(self.num_shares + 1, np.int32),
            np.zeros((num_items, 4), np.int32),
            np.zeros((num_merges, 3), np.int32),
        )


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The arrays of a plan on the device. A CUDA graph reads them again in each replay."""

    splits: DecodeSplits
    starts: Tensor
    items: Tensor
    merges: Tensor

    @classmethod
    def make(cls, splits: DecodeSplits, context_lens: Ints, device: torch.device) -> Self:
        """The plan of these contexts. Waits until it is on the device: for tests and benchmarks."""
        return cls(splits, *(torch.from_numpy(array).to(device) for array in splits.plan(context_lens)))


def decode_splits(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
) -> DecodeSplits:
    """Splits for as many programs as run on the device at the same time."""
    tile_m, tile_n, _ = decode_tile(num_heads // num_kv_heads, head_dim, dtype)
    if device.type == "cpu":
        programs = INTERPRETED_PROGRAMS
    else:
        programs = device_limits(device).multiprocessors * resident_programs(
            tile_m, tile_n, head_dim, dtype, cache_dtype, device
        )
    return DecodeSplits(max(1, programs // num_kv_heads), tile_n, window)


def decode_tile(group: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """TILE_M, TILE_N and TILE_D of the decode kernel; `group` is the number of query heads for each KV head."""
    tile_m: int = next_power_of_2(group)
    return max(16, tile_m), tile_keys(head_dim, dtype), tile_dims(head_dim)  # tl.dot wants 16 rows at least


def resident_programs(
    tile_m: int,
    tile_n: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> int:
    """How many programs of the decode kernel a multiprocessor runs at the same time.

    If fewer ran than this says, those that wait would take as long again; one too few costs little.
    """
    tile_d = tile_dims(head_dim)
    limits, options = device_limits(device), launch_options(tile_m, tile_n, tile_d, dtype, cache_dtype, device)
    # Of keys and of values, one tile is used and as many are loaded as there are stages for them.
    num_tiles = 4 if options["num_stages"] == 5 else 2
    shared = (
        num_tiles * tile_n * tile_d * cache_dtype.itemsize
        + tile_m * (tile_d + tile_n) * dtype.itemsize
        + _OTHER_SHARED_BYTES
        + _RESERVED_SHARED_BYTES
    )
    if tile_m > 16 or tile_d > 256 or head_dim < tile_d == 256:
        # More for many heads of a group, for the widest heads, and for the masks of the padding from head_dim to TILE_D
        registers = _MOST_REGISTERS
    else:
        registers = _FP32_REGISTERS if dtype == torch.float32 and cache_dtype.itemsize > 1 else _REGISTERS
    threads = options["num_warps"] * limits.warp_size
    return max(
        1,
        min(
            (limits.shared_memory + _RESERVED_SHARED_BYTES) // shared,
            limits.registers // (registers * threads),
        ),
    )


def _cuts_at(
    share_ends: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sequences that shares end in, and how many of their tiles are before that end."""
    sequences = np.searchsorted(ends, share_ends, side="right")
    tiles = share_ends - begins[sequences] - ITEM_TILES
    inside = tiles > 0
    return sequences[inside], tiles[inside]


def _cuts_every(step: int, num_tiles: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same for sequences that are cut after each `step` tiles."""
    counts = (-(-num_tiles // step) - 1).clip(0)
    sequences = np.repeat(np.arange(len(num_tiles)), counts)
    places = np.arange(len(sequences)) - np.repeat(counts.cumsum() - counts, counts)
    return sequences, step * (1 + places)
