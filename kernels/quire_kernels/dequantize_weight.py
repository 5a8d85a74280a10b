"""The numbers of a weight in codes of 8 or 4 bits, for products that take them from memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, require
from quire_kernels._code_words import WORDS, word_codes
from quire_kernels._shapes import ceil_div
from quire_kernels.weight_only_matrix import WeightOnlyMatrix

_TILE_OUTPUTS = 32


@triton.jit
def split_pairs(b_pairs):  # type: ignore[no-untyped-def]
    """Both numbers of pairs, in float32."""
    b_first = (b_pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    b_second = (b_pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return b_first.to(tl.float32), b_second.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def group_numbers(  # type: ignore[no-untyped-def]
    b_codes, b_pairs, b_factors, b_minimum_factors, HAS_ZEROS: tl.constexpr
):
    """float32 numbers of codes, with the pairs of their groups."""
    b_scales, b_seconds = split_pairs(b_pairs)
    b_numbers = b_codes.to(tl.float32)
    if HAS_ZEROS:
        b_numbers -= b_seconds
    b_numbers *= b_scales * b_factors
    if b_minimum_factors is not None:
        b_numbers += b_seconds * b_minimum_factors
    return b_numbers


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    p_numbers,
    p_words,
    p_factors,
    p_pairs,
    p_minimum_factors,
    stride_words,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    TILE_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    PLANES: tl.constexpr = 32 // BITS
    block = tl.program_id(0)
    o_output = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    m_output = o_output < OUTPUTS
    o_word = tl.arange(0, WORDS)
    p_column = p_words + o_output[:, None] * stride_words + (block * WORDS + o_word)[None, :]
    # [TILE_N, WORDS]
    b_words = tl.load(p_column, mask=m_output[:, None], other=0)
    b_factors = tl.load(p_factors + o_output, mask=m_output, other=0.0)[:, None]
    b_minimum_factors = None
    if p_minimum_factors is not None:
        b_minimum_factors = tl.load(p_minimum_factors + o_output, mask=m_output, other=0.0)[:, None]
    for plane in tl.static_range(PLANES):
        o_input = (block * PLANES + plane) * WORDS + o_word
        m_number = m_output[:, None] & (o_input < INPUTS)[None, :]
        b_codes = word_codes(b_words, plane, BITS, IS_E2M1)
        if GROUP is None:
            b_numbers = b_codes.to(tl.float32) * b_factors
        else:
            o_group = (o_input // GROUP)[None, :] * OUTPUTS + o_output[:, None]
            b_pairs = tl.load(p_pairs + o_group, mask=m_number, other=0)
            b_numbers = group_numbers(b_codes, b_pairs, b_factors, b_minimum_factors, HAS_ZEROS)
        p_number = p_numbers + o_output[:, None] * INPUTS + o_input[None, :]
        tl.store(p_number, b_numbers.to(p_numbers.dtype.element_ty), mask=m_number)


def dequantize_weight(weight: WeightOnlyMatrix, dtype: torch.dtype) -> Tensor:
    """The numbers [outputs, inputs], computed in float32 and rounded to float32, float16 or bfloat16.

    Raises ValueError: the weight has a wrong shape, dtype, stride or device, or the dtype is another.
    """
    weight.check()
    require(dtype in FLOAT_DTYPES, "dtype", "be float32, float16 or bfloat16")
    outputs = len(weight.words)
    numbers = torch.empty((outputs, weight.inputs), dtype=dtype, device=weight.words.device)
    _dequantize_kernel[(weight.words.shape[1] // WORDS, ceil_div(outputs, _TILE_OUTPUTS))](
        numbers,
        weight.words,
        weight.scales,
        weight.pairs,
        weight.minimum_factors,
        weight.words.stride(0),
        OUTPUTS=outputs,
        INPUTS=weight.inputs,
        GROUP=weight.group,
        BITS=weight.bits,
        HAS_ZEROS=weight.has_zeros,
        IS_E2M1=weight.is_e2m1,
        TILE_N=_TILE_OUTPUTS,
        WORDS=WORDS,
        num_warps=4,
    )
    return numbers


def dequantize_weight_reference(weight: WeightOnlyMatrix, dtype: torch.dtype) -> Tensor:
    """`dequantize_weight` in plain torch."""
    weight.check()
    return weight.dense().to(dtype)
