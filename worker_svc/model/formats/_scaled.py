"""Weights of one code in each byte, with a scale for each block of outputs and inputs: those of FP8 and of int8."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from quire_kernels._shapes import SCALED_GROUP
from quire_kernels.cpu.grouped_bytes import BYTE_GROUP_SIZES
from worker_svc.model.weight_format import BlockCodes, GroupCodes, equal_groups

Block: TypeAlias = tuple[int | None, int | None]
"""Outputs and inputs that have one scale; None: all of them."""
_MIDDLE = 8  # of the codes in 4 bits
_SIGN = 0x80  # the bit of codes in 8 bits


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """A `StoredWeight`: each number is code x scale, or (code - zero) x scale.

    It is computed in the dtype of the scales: codes and their differences are exact in it, and the product is rounded
    once.
    """

    codes: Tensor
    """int8 or float8_e4m3fn [outputs, inputs]."""
    scales: Tensor
    """[rows, columns] of blocks."""
    zeros: Tensor | None
    """int8 [rows, columns]; None: all are 0."""
    rows: Tensor
    """int64 [outputs]: the row of each output's block."""
    columns: Tensor
    """int64 [inputs]: the column of each input's block."""

    def outputs(self, start: int, stop: int) -> "ScaledWeight":
        return replace(self, codes=self.codes[start:stop], rows=self.rows[start:stop])

    def inputs(self, start: int, stop: int) -> "ScaledWeight":
        return replace(self, codes=self.codes[:, start:stop], columns=self.columns[start:stop])

    def dense(self) -> Tensor:
        dtype = self.scales.dtype
        weight = self.codes.to(dtype)
        if self.zeros is not None:
            weight.sub_(self._of_numbers(self.zeros).to(dtype))
        return weight.mul_(self._of_numbers(self.scales))

    def code_scales(self) -> Tensor | None:
        is_coded = self.codes.dtype == torch.int8 and self.zeros is None and self.scales.shape[1] == 1
        return self.scales[self.rows, 0].float() if is_coded else None

    def float8_scales(self) -> Tensor | None:
        if self.codes.dtype != torch.float8_e4m3fn:
            return None
        of_outputs = self.scales[self.rows].float()
        if self.scales.shape[1] == 1:
            return of_outputs
        firsts = self.columns[::SCALED_GROUP]
        in_groups = firsts.repeat_interleave(SCALED_GROUP)[: len(self.columns)]
        return of_outputs[:, firsts] if torch.equal(in_groups, self.columns) else None

    def group_codes(self) -> GroupCodes | None:
        # A format may store codes of fewer bits in bytes, around 0.
        if self.codes.dtype != torch.int8 or not self.codes.numel():
            return None
        least, largest = self.codes.aminmax()
        if least < -_MIDDLE or largest >= _MIDDLE:
            return None
        scales = self.scales[self.rows]
        zeros = torch.full(scales.shape, _MIDDLE) if self.zeros is None else self.zeros[self.rows] + _MIDDLE
        return GroupCodes((self.codes + _MIDDLE).view(torch.uint8), zeros, scales, self.columns)

    def block_codes(self) -> BlockCodes | None:
        size = equal_groups(self.columns, reversed(BYTE_GROUP_SIZES))
        if self.codes.dtype != torch.int8 or size is None:
            return None
        firsts = self.columns[::size]
        scales = self.scales[self.rows][:, firsts].float()
        minimums = None if self.zeros is None else -self.zeros[self.rows][:, firsts].float() * scales
        codes = self.codes.view(torch.uint8) ^ _SIGN  # 128 more
        return BlockCodes(codes, 8, _SIGN, scales, minimums, size)

    def _of_numbers(self, of_blocks: Tensor) -> Tensor:
        """The value of each number's block; one column where all inputs have the same."""
        rows = of_blocks[self.rows]
        return rows if of_blocks.shape[1] == 1 else rows[:, self.columns]


def blocks(size: int, block: int | None) -> Tensor:
    """int64 [size]: the block of each output or input; None: all are one block."""
    return torch.arange(size) // (block or size)


def num_blocks(size: int, block: int | None) -> int:
    """How many there are; the last one may not be full."""
    return -(-size // (block or size))
