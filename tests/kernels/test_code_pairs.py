"""Pairs of codes become float16 exactly, by Triton's operations and by the instructions for NVIDIA's GPUs."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels._checks import PagedKV
from quire_kernels._code_pairs import FP8_PTX, INT8_PTX, halve_rows, unpack_pairs, unpacking

Words = NDArray[np.uint32]

FORMATS = {"int8": (torch.int8, INT8_PTX), "fp8": (torch.float8_e4m3fn, FP8_PTX)}
SIZE = 1 << 16


def all_pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All pairs of codes as int16 [SIZE], and their values [SIZE, 2] in float16."""
    codes = torch.arange(SIZE, dtype=torch.int32).to(torch.int16)
    return codes, codes.view(dtype).reshape(SIZE, 2).to(torch.float16)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """The two codes of NaN in float8 are of no number: a vector that has one has a scale that is NaN too."""
    known = ~expected.isnan()
    assert int((~known).sum()) in (0, 4 * SIZE // 256)
    assert torch.equal(actual[known], expected[known])


@triton.jit  # type: ignore[untyped-decorator]
def _unpack_kernel(p_pairs, p_even, p_odd, is_int8: tl.constexpr, how: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    o_pair = tl.arange(0, size)
    b_even, b_odd = unpack_pairs(tl.load(p_pairs + o_pair), is_int8, how)
    tl.store(p_even + o_pair, b_even)
    tl.store(p_odd + o_pair, b_odd)


@pytest.mark.parametrize("name", FORMATS)
def test_every_pair_of_codes(device: str, name: str) -> None:
    pairs, expected = all_pairs(FORMATS[name][0])
    even, odd = (torch.empty(SIZE, dtype=torch.float16, device=device) for _ in range(2))
    how = "ptx" if device == "cuda" else "portable"
    _unpack_kernel[(1,)](pairs.to(device), even, odd, name == "int8", how, SIZE)
    assert_same(torch.stack([even, odd], 1).cpu(), expected)


def bytes_of(words: Words) -> NDArray[np.uint8]:
    """[words, 4], the lowest first."""
    return words[:, None].view(np.uint8)


def permuted(first: Words, second: Words, selector: Words) -> Words:
    both = np.concatenate([bytes_of(first), bytes_of(second)], axis=1)
    places = [int(selector[0]) >> 4 * place & 7 for place in range(4)]
    return np.ascontiguousarray(both[:, places]).view(np.uint32)[:, 0]


def halves_of(numbers: NDArray[np.float16]) -> Words:
    return np.ascontiguousarray(numbers).view(np.uint32)[:, 0]


def difference(first: Words, second: Words) -> Words:
    return halves_of(first[:, None].view(np.float16) - second[:, None].view(np.float16))


def from_e4m3(words: Words) -> Words:
    codes = torch.from_numpy(bytes_of(words)[:, :2].copy()).view(torch.float8_e4m3fn)
    return halves_of(codes.to(torch.float16).numpy())


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda word: word,
    "xor.b32": lambda first, second: first ^ second,
    "prmt.b32": permuted,
    "sub.rn.f16x2": difference,
    "cvt.rn.f16x2.e4m3x2": from_e4m3,
}


def run_ptx(code: str, words: Words) -> tuple[Words, Words]:
    """What the instructions leave in $0 and $1 for each word in $2."""
    registers = {"$2": words}

    def read(operand: str) -> Words:
        return registers[operand] if operand in registers else np.full_like(words, int(operand, 0))

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
            registers[target] = INSTRUCTIONS[name](*map(read, sources))
    return registers["$0"], registers["$1"]


@pytest.mark.parametrize("name", FORMATS)
def test_instructions_for_nvidia_convert_every_pair_of_codes(name: str) -> None:
    dtype, code = FORMATS[name]
    pairs, expected = all_pairs(dtype)
    # Two pairs a word, in such an order that both places have all
    order = torch.from_numpy(np.random.default_rng(0).permutation(SIZE))
    words = torch.stack([pairs, pairs[order]], 1).numpy().view(np.uint32)[:, 0]
    even, odd = (torch.from_numpy(half[:, None].view(np.float16)) for half in run_ptx(code.value, words))
    assert_same(torch.stack([even[:, 0], odd[:, 0]], 1), expected)
    assert_same(torch.stack([even[:, 1], odd[:, 1]], 1), expected[order])


@triton.jit  # type: ignore[untyped-decorator]
def _halve_kernel(p_rows, p_even, p_odd, p_factors, rows: tl.constexpr, dims: tl.constexpr):  # type: ignore[no-untyped-def]
    o_row = tl.arange(0, rows)
    b_rows = tl.load(p_rows + o_row[:, None] * dims + tl.arange(0, dims)[None, :])
    b_even, b_odd, b_factor = halve_rows(b_rows, rows, dims)
    o_half = o_row[:, None] * (dims // 2) + tl.arange(0, dims // 2)[None, :]
    tl.store(p_even + o_half, b_even)
    tl.store(p_odd + o_half, b_odd)
    tl.store(p_factors + o_row, b_factor)


def test_queries_of_any_size_are_halved_without_loss(device: str) -> None:
    rows = torch.randn(16, 32, device=device).bfloat16().float()
    rows *= torch.tensor([2.0**exponent for exponent in range(-120, 120, 15)], device=device)[:, None]
    rows[3] = 0.0
    even, odd = (torch.empty(16, 16, dtype=torch.float16, device=device) for _ in range(2))
    factors = torch.empty(16, device=device)
    _halve_kernel[(1,)](rows, even, odd, factors, 16, 32)
    halves = torch.stack([even, odd], 2).float()
    assert bool((halves.abs().amax((1, 2))[factors > 0] >= 1.0).all())
    assert bool((halves.abs() < 2.0).all())
    assert torch.equal(halves.flatten(1) * factors[:, None], rows)


@pytest.mark.parametrize(
    ("query_dtype", "cache_dtype", "head_dim", "tile_m", "expected"),
    [
        (torch.bfloat16, torch.int8, 128, 128, "portable"),
        (torch.float16, torch.float8_e4m3fn, 80, 128, "portable"),
        (torch.float32, torch.int8, 128, 16, None),
        (torch.float16, torch.float16, 128, 16, None),
        (torch.float16, torch.int8, 16, 16, None),
        (torch.float16, torch.int8, 33, 16, None),
        (torch.float16, torch.int8, 256, 64, None),
        (torch.float16, torch.int8, 256, 16, "portable"),
    ],
)
def test_which_caches_are_read_in_pairs(
    query_dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, tile_m: int, expected: str | None
) -> None:
    cache = torch.empty(2, 1, 16, head_dim, dtype=cache_dtype)
    scales = None if cache_dtype.itemsize > 1 else torch.empty(2, 1, 16)
    query = torch.empty(1, 1, head_dim, dtype=query_dtype)
    assert unpacking(query, PagedKV(cache, cache, scales, scales), tile_m) == expected
