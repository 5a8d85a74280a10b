"""The types of blocks of GGUF that are multiplied as they are stored: codes of a block, and the scales of its groups.

Source: ggml's `ggml-quants.c`, and the `gguf` package 0.19, `gguf/quants.py`, whose numbers these are to the last bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Decode: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""Takes blocks, uint8 [count, bytes]. Returns codes, uint8 [count, numbers], and of the groups the scales and, if the
type has them, the minimums, float32 [count, groups].
"""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How neighbouring inputs of an output are stored: each number is (code - zero) x scale, plus a minimum."""

    numbers: int
    """In a block."""
    num_bytes: int
    """Of a block."""
    group: int
    """How many numbers have one scale."""
    bits: int
    """Of a code."""
    zero: int
    decode: Decode
    is_e2m1: bool = False
    """Whether codes are numbers of e2m1: see `BlockCodes`."""

    def row_bytes(self, inputs: int) -> int:
        """What an output of so many inputs takes; they are whole blocks."""
        return inputs // self.numbers * self.num_bytes


def _half(blocks: Tensor, at: int) -> Tensor:
    """The number in float16 that begins at a byte of each block, as float32 [count, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(stored: Tensor, bits: int, width: int) -> Tensor:
    """The fields of `bits` bits in bytes [count, n]: of `width` bytes first the lowest fields, then the next."""
    parts = stored.reshape(len(stored), -1, 1, width)
    mask = (1 << bits) - 1
    return torch.cat([parts >> shift & mask for shift in range(0, 8, bits)], 2).flatten(1)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return _fields(blocks[:, 2:], 4, 16), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _fields(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    codes = _fields(blocks[:, 6:], 4, 16) | _fields(blocks[:, 2:6], 1, 1) << 4
    return codes, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = _fields(blocks[:, 8:], 4, 16) | _fields(blocks[:, 4:8], 1, 1) << 4
    return codes, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None


def _q2_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    fields = blocks[:, :16]
    scales, minimums = _half(blocks, 80) * (fields & 15), _half(blocks, 82) * (fields >> 4)
    return _fields(blocks[:, 16:80], 2, 32), scales, -minimums


def _q3_k(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    codes = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    fields = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    return codes, _half(blocks, 108) * (fields.float() - 32), None


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: eight of each, in 6 bits."""
    first, second, rest = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], 1)
    minimums = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], 1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minimums)


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _fields(blocks[:, 16:], 4, 32), *_scales_and_minimums(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return codes, *_scales_and_minimums(blocks)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return codes, _half(blocks, 208) * blocks[:, 192:208].view(torch.int8), None


# What the codes of IQ4_NL and IQ4_XS mean, with 128 added.
_STEPS = torch.tensor([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=torch.uint8)


def _iq4_nl(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return _STEPS[_fields(blocks[:, 2:], 4, 16).int()], _half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    fields = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    return _STEPS[_fields(blocks[:, 8:], 4, 16).int()], _half(blocks, 0) * (fields.float() - 32), None


def _mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    # Numbers are halves of those in `E2M1_DOUBLES`.
    scales = blocks[:, :1].contiguous().view(torch.float8_e8m0fnu).float() / 2
    return _fields(blocks[:, 1:], 4, 16), scales, None


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, 32, 4, 8, _q4_0),
    "Q4_1": BlockType(32, 20, 32, 4, 0, _q4_1),
    "Q5_0": BlockType(32, 22, 32, 5, 16, _q5_0),
    "Q5_1": BlockType(32, 24, 32, 5, 0, _q5_1),
    "Q8_0": BlockType(32, 34, 32, 8, 128, _q8_0),
    "Q2_K": BlockType(256, 84, 16, 2, 0, _q2_k),
    "Q3_K": BlockType(256, 110, 16, 3, 4, _q3_k),
    "Q4_K": BlockType(256, 144, 32, 4, 0, _q4_k),
    "Q5_K": BlockType(256, 176, 32, 5, 0, _q5_k),
    "Q6_K": BlockType(256, 210, 16, 6, 32, _q6_k),
    "IQ4_NL": BlockType(32, 18, 32, 8, 128, _iq4_nl),
    "IQ4_XS": BlockType(256, 136, 32, 8, 128, _iq4_xs),
    "MXFP4": BlockType(32, 17, 32, 4, 0, _mxfp4, is_e2m1=True),
}
"""By their names in GGUF. Codes of IQ4_NL and IQ4_XS are steps in a table of 8 bits."""
