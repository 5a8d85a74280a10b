"""Rows in codes of 8 bits, as products of codes take them: a number is its code times a scale.

The scale is that of its row, or of its group of neighbouring numbers in the row: it depends on the row alone, so a
row's codes do not depend on the other rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import QUANTIZED_DTYPES, require
from quire_kernels._shapes import ceil_div, check_rows, next_power_of_2
from quire_kernels.activation import (
    Activation,
    activate,
    activation_product_reference,
    check_factors,
    check_gate_up,
    check_plain,
    gated,
    gated_activation_reference,
    plain_activation_reference,
)
from quire_kernels.kv_quantization import MAX_CODES, encode, quantize

# Numbers that a program reads at once.
_TILE = 2048


class RowCoding(NamedTuple):
    """How rows are coded."""

    dtype: torch.dtype
    """Of codes: int8 or float8_e4m3fn."""
    group: int | None = None
    """How many neighbouring numbers have one scale, a power of two from 16 to 1024; None: all of a row."""

    def num_groups(self, width: int) -> int:
        """Scales of a row; the last group may be smaller."""
        return 1 if self.group is None else ceil_div(width, self.group)


class CodedRows(NamedTuple):
    """Rows in codes. A row with a number that is not finite has a scale, or a group's, that is NaN."""

    codes: Tensor
    """int8 or float8_e4m3fn [rows, width], contiguous."""
    scales: Tensor
    """float32 [rows, groups], contiguous."""

    def decoded(self, group: int | None = None) -> Tensor:
        """The numbers, float32 [rows, width]; `group` is that of their coding."""
        if group is None:
            return self.codes.float() * self.scales
        return self.codes.float() * self.scales.repeat_interleave(group, 1)[:, : self.codes.shape[1]]


@triton.jit  # type: ignore[untyped-decorator]
def store_codes(  # type: ignore[no-untyped-def]
    b_rows,
    p_codes,
    p_scales,
    row,
    m_row,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_CODE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    """Stores whole float32 rows [TILE_ROWS, TILE_WIDTH], which are zero beyond WIDTH, in codes. GROUP divides
    TILE_WIDTH.
    """
    TILE_GROUPS: tl.constexpr = TILE_WIDTH // GROUP
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    b_groups = tl.reshape(b_rows, [TILE_ROWS, TILE_GROUPS, GROUP])
    # [TILE_ROWS, TILE_GROUPS]; a sum of zeros, or NaN
    b_largest = tl.max(tl.abs(b_groups), axis=2) + tl.sum(b_groups * 0.0, axis=2)
    b_codes = encode(b_groups, b_largest[:, :, None], MAX_CODE, p_codes.dtype.element_ty)
    o_column = tl.arange(0, TILE_WIDTH)
    o_codes = (row * WIDTH)[:, None] + o_column[None, :]
    m_codes = m_row[:, None] & (o_column < WIDTH)[None, :]
    tl.store(p_codes + o_codes, tl.reshape(b_codes, [TILE_ROWS, TILE_WIDTH]), mask=m_codes)
    o_group = tl.arange(0, TILE_GROUPS)
    o_scales = (row * GROUPS)[:, None] + o_group[None, :]
    tl.store(p_scales + o_scales, b_largest / MAX_CODE, mask=m_row[:, None] & (o_group < GROUPS)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    p_row, p_factors, o_column, WIDTH: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr
):
    """float32 numbers of a row; zeros beyond WIDTH, as the activation of 0 is 0."""
    m_column = o_column < WIDTH
    b_numbers = tl.load(p_row + o_column, mask=m_column, other=0.0).to(tl.float32)
    if GATED:
        b_up = tl.load(p_row + WIDTH + o_column, mask=m_column, other=0.0).to(tl.float32)
        b_numbers = gated(b_numbers, b_up, ACTIVATION)
    elif p_factors is not None:
        b_factors = tl.load(p_factors + o_column, mask=m_column, other=0.0).to(tl.float32)
        b_numbers = gated(b_numbers, b_factors, ACTIVATION)
    elif ACTIVATION is not None:
        b_numbers = activate(b_numbers, ACTIVATION)
    return b_numbers


@triton.jit  # type: ignore[untyped-decorator]
def _code_rows_kernel(  # type: ignore[no-untyped-def]
    p_codes,
    p_scales,
    p_inputs,
    p_factors,
    stride_inputs,
    stride_factors,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_CODE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_inputs + row * stride_inputs
    p_row_factors = None if p_factors is None else p_factors + row * stride_factors
    o_tile = tl.arange(0, TILE)
    if GROUP is None:
        # The numbers are computed twice, so that rows of any width fit the registers; they are read from a cache then.
        b_largest = tl.zeros([TILE], tl.float32)
        b_faults = tl.zeros([TILE], tl.float32)
        for start in range(0, WIDTH, TILE):
            b_numbers = _load(p_row, p_row_factors, start + o_tile, WIDTH, GATED, ACTIVATION)
            b_largest = tl.maximum(b_largest, tl.abs(b_numbers))
            b_faults += b_numbers * 0.0
        largest = tl.max(b_largest, axis=0) + tl.sum(b_faults, axis=0)
        tl.store(p_scales + row, largest / MAX_CODE)
        for start in range(0, WIDTH, TILE):
            o_column = start + o_tile
            b_codes = encode(
                _load(p_row, p_row_factors, o_column, WIDTH, GATED, ACTIVATION),
                largest,
                MAX_CODE,
                p_codes.dtype.element_ty,
            )
            tl.store(p_codes + row * WIDTH + o_column, b_codes, mask=o_column < WIDTH)
    else:
        TILE_GROUPS: tl.constexpr = TILE // GROUP
        GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        for start in range(0, WIDTH, TILE):
            o_column = start + o_tile
            b_numbers = tl.reshape(
                _load(p_row, p_row_factors, o_column, WIDTH, GATED, ACTIVATION), [TILE_GROUPS, GROUP]
            )
            b_largest = tl.max(tl.abs(b_numbers), axis=1) + tl.sum(b_numbers * 0.0, axis=1)
            b_codes = encode(b_numbers, b_largest[:, None], MAX_CODE, p_codes.dtype.element_ty)
            tl.store(p_codes + row * WIDTH + o_column, tl.reshape(b_codes, [TILE]), mask=o_column < WIDTH)
            o_group = start // GROUP + tl.arange(0, TILE_GROUPS)
            tl.store(p_scales + row * GROUPS + o_group, b_largest / MAX_CODE, mask=o_group < GROUPS)


def code_rows(inputs: Tensor, coding: RowCoding) -> CodedRows:
    """The rows in codes.

    Args:
        inputs: [num_rows, width], last dimension contiguous.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype or stride.
    """
    check_rows(inputs, "inputs")
    return _launch(inputs, None, coding, inputs.shape[1], is_gated=False)


def code_activation(inputs: Tensor, activation: Activation, coding: RowCoding, *, is_gated: bool) -> CodedRows:
    """The activation of each number, or of the gate times up, in codes: it is computed in float32, and not rounded to
    another dtype before.

    Args:
        inputs: [num_rows, width], or with `is_gated` [num_rows, 2 * width], gate first; last dimension contiguous.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype or stride.
    """
    if not is_gated:
        check_rows(inputs, "inputs")
        check_plain(activation)
        return _launch(inputs, activation, coding, inputs.shape[1], is_gated=False)
    check_gate_up(inputs)
    return _launch(inputs, activation, coding, inputs.shape[1] // 2, is_gated=True)


def code_activation_product(inputs: Tensor, factors: Tensor, activation: Activation, coding: RowCoding) -> CodedRows:
    """The activation of each number, times its factor, in codes, as `code_activation` computes them.

    Args:
        inputs, factors: [num_rows, width], last dimension contiguous.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype, stride or device.
    """
    check_factors(inputs, factors, activation)
    return _launch(inputs, activation, coding, inputs.shape[1], is_gated=False, factors=factors)


def _launch(
    inputs: Tensor,
    activation: Activation | None,
    coding: RowCoding,
    width: int,
    *,
    is_gated: bool,
    factors: Tensor | None = None,
) -> CodedRows:
    rows = empty_codes(len(inputs), width, coding, inputs.device)
    if rows.codes.numel() == 0:
        return rows
    tile: int = min(_TILE, max(coding.group or 1, next_power_of_2(width)))
    _code_rows_kernel[(len(inputs),)](
        rows.codes,
        rows.scales,
        inputs,
        factors,
        inputs.stride(0),
        0 if factors is None else factors.stride(0),
        WIDTH=width,
        GATED=is_gated,
        ACTIVATION=None if activation is None else activation.value,
        GROUP=coding.group,
        MAX_CODE=MAX_CODES[coding.dtype],
        TILE=tile,
        num_warps=4,
    )
    return rows


def empty_codes(num_rows: int, width: int, coding: RowCoding, device: torch.device) -> CodedRows:
    """Memory for rows in codes. Raises ValueError, which names `coding`, if there is no such coding."""
    require(coding.dtype in QUANTIZED_DTYPES, "coding", "have codes of int8 or float8_e4m3fn")
    group = coding.group
    fits = group is None or (16 <= group <= 1024 and group & (group - 1) == 0)
    require(fits, "coding", "have groups of a power of two from 16 to 1024 numbers, or none")
    return CodedRows(
        torch.empty((num_rows, width), dtype=coding.dtype, device=device),
        torch.empty((num_rows, coding.num_groups(width)), device=device),
    )


def code_rows_reference(inputs: Tensor, coding: RowCoding) -> CodedRows:
    """`code_rows` in plain torch."""
    check_rows(inputs, "inputs")
    num_rows, width = inputs.shape
    rows = empty_codes(num_rows, width, coding, inputs.device)
    num_groups = coding.num_groups(width)
    group = width if coding.group is None else coding.group
    padded = torch.nn.functional.pad(inputs.float(), (0, num_groups * group - width))
    codes, scales = quantize(padded.view(num_rows, num_groups, group), coding.dtype)
    is_finite = padded.view(num_rows, num_groups, group).isfinite().all(-1)
    rows.codes.copy_(codes.view(num_rows, num_groups * group)[:, :width])
    rows.scales.copy_(scales.masked_fill(~is_finite, torch.nan))
    return rows


def code_activation_reference(
    inputs: Tensor, activation: Activation, coding: RowCoding, *, is_gated: bool
) -> CodedRows:
    """`code_activation` in plain torch."""
    compute = gated_activation_reference if is_gated else plain_activation_reference
    return code_rows_reference(compute(inputs.float(), activation), coding)


def code_activation_product_reference(
    inputs: Tensor, factors: Tensor, activation: Activation, coding: RowCoding
) -> CodedRows:
    """`code_activation_product` in plain torch."""
    return code_rows_reference(activation_product_reference(inputs.float(), factors, activation), coding)
