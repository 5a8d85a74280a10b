"""Pairs of codes become float16 exactly, by Triton's operations and by the instructions for NVIDIA's GPUs."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ptx import numbers_of, run_ptx
from quire_kernels._checks import PagedKV
from quire_kernels._code_pairs import FP8_PTX, INT8_PTX, halve_rows, unpack_pairs, unpacking

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


@pytest.mark.parametrize("name", FORMATS)
def test_instructions_for_nvidia_convert_every_pair_of_codes(name: str) -> None:
    dtype, code = FORMATS[name]
    pairs, expected = all_pairs(dtype)
    # Two pairs a word, in such an order that both places have all
    order = torch.from_numpy(np.random.default_rng(0).permutation(SIZE))
    words = torch.stack([pairs, pairs[order]], 1).numpy().view(np.uint32)[:, 0]
    registers = run_ptx(code.value, {"$2": words})
    even, odd = (numbers_of(registers[place], torch.float16) for place in ("$0", "$1"))
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
