"""Runs the few instructions of PTX that kernels use inline, by NumPy, each on many words at once."""

import re
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint32]


def bytes_of(words: Words) -> NDArray[np.uint8]:
    """[words, 4], the lowest first."""
    return words[:, None].view(np.uint8)


def _permuted(first: Words, second: Words, selector: Words) -> Words:
    both = np.concatenate([bytes_of(first), bytes_of(second)], axis=1)
    places = [int(selector[0]) >> 4 * place & 7 for place in range(4)]
    return np.ascontiguousarray(both[:, places]).view(np.uint32)[:, 0]


def _by_table(first: Words, second: Words, third: Words, table: Words) -> Words:
    """lop3: each bit of the result is that of the table at the place of the three bits."""
    result = np.zeros_like(first)
    for place in range(8):
        if int(table[0]) >> place & 1:
            bits = [word if place >> shift & 1 else ~word for word, shift in ((first, 2), (second, 1), (third, 0))]
            result |= bits[0] & bits[1] & bits[2]
    return result


def halves_of(numbers: NDArray[np.float16]) -> Words:
    return np.ascontiguousarray(numbers).view(np.uint32)[:, 0]


def _pairs(words: Words) -> NDArray[np.float16]:
    return words[:, None].view(np.float16)


def numbers_of(words: Words, dtype: torch.dtype) -> Tensor:
    """The two numbers of each word, [words, 2], the lower one first."""
    return torch.from_numpy(np.ascontiguousarray(words)[:, None].view(np.int16)).view(dtype)


def _fused(first: Words, second: Words, third: Words) -> Words:
    """A product and a sum of pairs of bfloat16, rounded once."""
    one, two, three = (numbers_of(each, torch.bfloat16).double() for each in (first, second, third))
    return np.ascontiguousarray((one * two + three).to(torch.bfloat16).view(torch.int16).numpy()).view(np.uint32)[:, 0]


def _from_e4m3(words: Words) -> Words:
    codes = torch.from_numpy(bytes_of(words)[:, :2].copy()).view(torch.float8_e4m3fn)
    return halves_of(codes.to(torch.float16).numpy())


_INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda word: word,
    "and.b32": lambda first, second: first & second,
    "xor.b32": lambda first, second: first ^ second,
    "shl.b32": lambda word, count: word << count,
    "shr.b32": lambda word, count: word >> count,  # of words without a sign: a mask follows
    "prmt.b32": _permuted,
    "lop3.b32": _by_table,
    "add.rn.f16x2": lambda first, second: halves_of(_pairs(first) + _pairs(second)),
    "sub.rn.f16x2": lambda first, second: halves_of(_pairs(first) - _pairs(second)),
    "mul.rn.f16x2": lambda first, second: halves_of(_pairs(first) * _pairs(second)),
    "fma.rn.bf16x2": _fused,
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
}


def run_ptx(code: str, given: Mapping[str, Words]) -> Mapping[str, Words]:
    """The registers after the instructions, with the operands that are given, such as $1."""
    registers = dict(given)
    like = next(iter(given.values()))

    def read(operand: str) -> Words:
        return registers[operand] if operand in registers else np.full_like(like, int(operand, 0))

    for line in code.strip("{} \n").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, operands = line.split(maxsplit=1)
        if unpacked := re.match(r"\{(\w+), (\w+)\}, (\w+)$", operands):
            low, high, word = unpacked.groups()
            registers[low] = registers[word] & np.uint32(0xFFFF)
            registers[high] = registers[word] >> np.uint32(16)
        else:
            target, *sources = operands.split(", ")
            registers[target] = _INSTRUCTIONS[name](*map(read, sources))
    return registers
