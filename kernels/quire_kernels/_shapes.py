"""Checks of tensors that are not the KV cache's layers: rows, vectors, whole blocks. They read metadata only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, require


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least the number, which is at least 1. Triton's own takes ten times as long."""
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


SCALED_GROUP = 128
"""Inputs that have one scale in products of codes of 8 bits, where not all have it."""

# Messages are made where a check fails only: every launch comes through here.


def check_rows(rows: Tensor, argument: str, dtypes: Sequence[torch.dtype] = FLOAT_DTYPES) -> None:
    """The tensor must be [rows, width] of one of the dtypes, contiguous in its last dimension."""
    require(rows.ndim == 2, argument, "be two-dimensional")
    if rows.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        require(False, argument, f"be {names}")
    require(rows.stride(1) == 1 or rows.shape[1] <= 1, argument, "be contiguous in its last dimension")


def check_vector(vector: Tensor, argument: str, length: int, dtype: torch.dtype, device: torch.device) -> None:
    """The tensor must be contiguous, of the length and dtype, on the device."""
    if vector.shape != (length,):
        require(False, argument, f"have shape [{length}], not {list(vector.shape)}")
    if vector.dtype != dtype:
        require(False, argument, f"be {str(dtype).removeprefix('torch.')}")
    require(vector.is_contiguous(), argument, "be contiguous")
    if vector.device != device:
        require(False, argument, f"be on {device}")


def check_blocks(blocks: Tensor, argument: str) -> None:
    """The tensor must be [num_blocks, ...] and contiguous, so that each block is one piece of memory."""
    require(blocks.ndim >= 2, argument, "be [num_blocks, ...]")
    require(blocks.is_contiguous(), argument, "be contiguous")


def check_same_blocks(blocks: Tensor, like: Tensor, argument: str, name: str) -> None:
    """Both tensors must hold blocks of one shape and dtype; `name` is the argument that `like` came as."""
    require(blocks.shape[1:] == like.shape[1:], argument, f"have blocks of the shape of {name}'s")
    require(blocks.dtype == like.dtype, argument, f"have the dtype of {name}")
