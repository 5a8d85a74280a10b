"""Codes in words become numbers exactly: by Triton's operations, and by the instructions for NVIDIA's GPUs."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from ptx import numbers_of, run_ptx
from quire_kernels._code_words import WORDS, e2m1_ptx, integer_ptx, word_numbers
from quire_kernels.cpu.nibbles import E2M1_DOUBLES
from quire_kernels.weight_only_matrix import pack_codes

OUTPUTS = 32
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _words(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words [OUTPUTS, WORDS] and their codes [OUTPUTS, planes x WORDS]: every code in each plane."""
    inputs, least = WORDS * 32 // bits, 0 if bits == 4 else -128
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(OUTPUTS * WORDS, generator=generator) % 2**bits + least for _ in range(32 // bits)]
    codes = torch.stack([order.view(OUTPUTS, WORDS) for order in orders], 1).reshape(OUTPUTS, inputs)
    codes = codes.to(torch.uint8 if bits == 4 else torch.int8)
    return pack_codes(codes, bits), codes


def _numbers(codes: torch.Tensor, *, is_e2m1: bool) -> torch.Tensor:
    return torch.tensor(E2M1_DOUBLES)[codes.int()] if is_e2m1 else codes.int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "is_e2m1"), [(4, False), (4, True), (8, False)])
def test_instructions_for_nvidia_convert_every_code(bits: int, dtype: str, *, is_e2m1: bool) -> None:
    words, codes = _words(bits)
    first, second = (words[:, place::2].reshape(-1).numpy().view(np.uint32) for place in (0, 1))
    for plane in range(32 // bits):
        if is_e2m1:
            code = e2m1_ptx(plane, is_bfloat16=dtype == "bfloat16")
        else:
            code = integer_ptx(bits, plane, is_bfloat16=dtype == "bfloat16", has_zeros=False)
        pairs = numbers_of(run_ptx(code, {"$1": first, "$2": second})["$0"], DTYPES[dtype])
        expected = _numbers(codes[:, plane * WORDS : (plane + 1) * WORDS], is_e2m1=is_e2m1)
        assert torch.equal(pairs.int().view(OUTPUTS, WORDS), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_instructions_for_nvidia_take_zero_points_off(dtype: str) -> None:
    words, codes = _words(4)
    first, second = (words[:, place::2].reshape(-1).numpy().view(np.uint32) for place in (0, 1))
    for zero in (0, 7, 64):
        bias = torch.full((len(first), 2), -(128.0 if dtype == "bfloat16" else 1024.0) - zero).to(DTYPES[dtype])
        given = {"$1": first, "$2": second, "$3": bias.view(torch.int16).numpy().view(np.uint32)[:, 0]}
        for plane in range(8):
            code = integer_ptx(4, plane, is_bfloat16=dtype == "bfloat16", has_zeros=True)
            pairs = numbers_of(run_ptx(code, given)["$0"], DTYPES[dtype])
            expected = codes[:, plane * WORDS : (plane + 1) * WORDS].int() - zero
            assert torch.equal(pairs.int().view(OUTPUTS, WORDS), expected)


@triton.jit  # type: ignore[untyped-decorator]
def _number_kernel(  # type: ignore[no-untyped-def]
    p_words, p_numbers, bits: tl.constexpr, is_e2m1: tl.constexpr, runs_ptx: tl.constexpr, outputs: tl.constexpr,
    num_words: tl.constexpr,
):  # fmt: skip
    o_output, o_word = tl.arange(0, outputs)[:, None], tl.arange(0, num_words)[None, :]
    b_words = tl.load(p_words + o_output * num_words + o_word)
    for plane in tl.static_range(32 // bits):
        b_numbers = word_numbers(b_words, None, plane, bits, is_e2m1, p_numbers.dtype.element_ty, runs_ptx)
        tl.store(p_numbers + (o_output * (32 // bits) + plane) * num_words + o_word, b_numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "is_e2m1"), [(4, False), (4, True), (8, False)])
def test_every_code(bits: int, dtype: torch.dtype, device: str, *, is_e2m1: bool) -> None:
    words, codes = _words(bits)
    numbers = torch.empty(codes.shape, dtype=dtype, device=device)
    _number_kernel[(1,)](words.to(device), numbers, bits, is_e2m1, device == "cuda", OUTPUTS, WORDS)
    assert torch.equal(numbers.cpu().int(), _numbers(codes, is_e2m1=is_e2m1))
