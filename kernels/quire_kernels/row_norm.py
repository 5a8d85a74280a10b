"""Norms of rows, with the addition to the residual stream around them.

Root mean square norms (arXiv:1910.07467) and layer norms (arXiv:1607.06450).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, require
from quire_kernels._shapes import ceil_div, check_rows, check_vector, next_power_of_2
from quire_kernels.coded_rows import CodedRows, RowCoding, code_rows_reference, empty_codes, store_codes
from quire_kernels.kv_quantization import MAX_CODES

# Elements that a program holds; narrower rows share one.
_TILE = 1024
_MAX_WIDTH = 1 << 16


class RowNorm(NamedTuple):
    """A norm of rows: a row, less its mean if `is_centered`, is divided by its root mean square and multiplied by
    `weight` [width], and `bias` [width] is added.
    """

    weight: Tensor
    epsilon: float
    """Added to the mean square."""
    bias: Tensor | None = None
    is_centered: bool = False


@triton.jit  # type: ignore[untyped-decorator]
def normalize(  # type: ignore[no-untyped-def]
    b_rows, p_weight, p_bias, epsilon, o_column, m_column, WIDTH: tl.constexpr, CENTERED: tl.constexpr
):
    """The norm of rows [TILE_ROWS, TILE_WIDTH] that are zero where masked."""
    if CENTERED:
        b_mean = tl.sum(b_rows, axis=1) / WIDTH
        b_rows = tl.where(m_column[None, :], b_rows - b_mean[:, None], 0.0)
    b_scale = tl.rsqrt(tl.sum(b_rows * b_rows, axis=1) / WIDTH + epsilon)
    # [TILE_WIDTH]
    b_weight = tl.load(p_weight + o_column, mask=m_column, other=0.0).to(tl.float32)
    b_normed = b_rows * b_scale[:, None] * b_weight[None, :]
    if p_bias is not None:
        b_normed += tl.load(p_bias + o_column, mask=m_column, other=0.0).to(tl.float32)[None, :]
    return b_normed


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _row_norm_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_scales,
    p_inputs,
    p_update,
    p_weight,
    p_bias,
    p_update_weight,
    p_update_bias,
    num_rows,
    epsilon,
    update_epsilon,
    sum_scale,
    stride_inputs,
    stride_update,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
    UPDATE_CENTERED: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_CODE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    row = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    m_row = row < num_rows
    o_column = tl.arange(0, TILE_WIDTH)
    m_column = o_column < WIDTH
    m_tile = m_row[:, None] & m_column[None, :]
    o_inputs = (row * stride_inputs)[:, None] + o_column[None, :]
    # [TILE_ROWS, TILE_WIDTH]
    b_inputs = tl.load(p_inputs + o_inputs, mask=m_tile, other=0.0).to(tl.float32)
    if p_update is not None:
        o_update = (row * stride_update)[:, None] + o_column[None, :]
        b_update = tl.load(p_update + o_update, mask=m_tile, other=0.0).to(tl.float32)
        if p_update_weight is not None:
            b_update = normalize(
                b_update, p_update_weight, p_update_bias, update_epsilon, o_column, m_column, WIDTH, UPDATE_CENTERED
            )
        b_sum = b_inputs + b_update
        if sum_scale is not None:
            b_sum *= sum_scale
        tl.store(p_inputs + o_inputs, b_sum, mask=m_tile)
        if not NORM_FIRST:
            b_inputs = b_sum
    b_output = b_inputs
    if p_weight is not None:
        b_output = normalize(b_inputs, p_weight, p_bias, epsilon, o_column, m_column, WIDTH, CENTERED)
    if p_scales is None:
        o_output = (row * WIDTH)[:, None] + o_column[None, :]
        tl.store(p_output + o_output, b_output.to(p_output.dtype.element_ty), mask=m_tile)
    else:
        store_codes(b_output, p_output, p_scales, row, m_row, WIDTH, GROUP, MAX_CODE, TILE_ROWS, TILE_WIDTH)


def row_norm(inputs: Tensor, norm: RowNorm, dtype: torch.dtype | None = None) -> Tensor:
    """The norm of each row, computed in float32.

    Args:
        inputs: [num_rows, width], last dimension contiguous.
        norm: its weight and bias are contiguous.
        dtype: of the result; None: the weight's.

    Returns:
        [num_rows, width], contiguous.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    check_rows(inputs, "inputs")
    output = _empty(inputs, norm, dtype)
    _launch(output, inputs, None, norm, None, norm_first=False)
    return output


def row_norm_codes(inputs: Tensor, norm: RowNorm, coding: RowCoding) -> CodedRows:
    """`row_norm` in codes: the norm is not rounded to another dtype before.

    Raises:
        ValueError: as `row_norm`, and for a wrong coding.
    """
    check_rows(inputs, "inputs")
    rows = empty_codes(len(inputs), inputs.shape[1], coding, inputs.device)
    _launch(rows.codes, inputs, None, norm, None, norm_first=False, scales=rows.scales, coding=coding)
    return rows


def add_row_norm(
    hidden: Tensor,
    update: Tensor | None,
    norm: RowNorm | None,
    dtype: torch.dtype | None = None,
    *,
    update_norm: RowNorm | None = None,
    norm_first: bool = False,
    sum_scale: float | None = None,
) -> Tensor:
    """Adds the update to the residual stream in place, and returns `row_norm` of the sum, or the sum.

    Args:
        hidden: float32 [num_tokens, width], last dimension contiguous; the sum is not rounded.
        update: [num_tokens, width], last dimension contiguous; None: nothing is added.
        norm: of the sum; None: it is returned as it is.
        dtype: of the result; None: the weight's, or that of `hidden` without a norm.
        update_norm: of the update, before it is added; None: there is none.
        norm_first: the result is the norm of `hidden` without the update.
        sum_scale: what the sum is multiplied by, only with an update; None: 1.

    Returns:
        [num_tokens, width], contiguous.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    check_sum(hidden, update, sum_scale)
    output = _empty(hidden, norm, dtype)
    _launch(output, hidden, update, norm, update_norm, norm_first=norm_first, sum_scale=sum_scale)
    return output


def add_row_norm_codes(
    hidden: Tensor,
    update: Tensor | None,
    norm: RowNorm | None,
    coding: RowCoding,
    *,
    update_norm: RowNorm | None = None,
    norm_first: bool = False,
    sum_scale: float | None = None,
) -> CodedRows:
    """`add_row_norm` in codes: the norm is not rounded to another dtype before.

    Raises:
        ValueError: as `add_row_norm`, and for a wrong coding.
    """
    check_sum(hidden, update, sum_scale)
    rows = empty_codes(len(hidden), hidden.shape[1], coding, hidden.device)
    how: dict[str, Any] = {"norm_first": norm_first, "sum_scale": sum_scale, "coding": coding}
    _launch(rows.codes, hidden, update, norm, update_norm, scales=rows.scales, **how)
    return rows


def _empty(inputs: Tensor, norm: RowNorm | None, dtype: torch.dtype | None) -> Tensor:
    require(dtype is None or dtype in FLOAT_DTYPES, "dtype", "be float32, float16 or bfloat16")
    default = inputs.dtype if norm is None else norm.weight.dtype
    return torch.empty(inputs.shape, dtype=dtype or default, device=inputs.device)


def _launch(
    output: Tensor,
    inputs: Tensor,
    update: Tensor | None,
    norm: RowNorm | None,
    update_norm: RowNorm | None,
    *,
    norm_first: bool,
    sum_scale: float | None = None,
    scales: Tensor | None = None,
    coding: RowCoding | None = None,
) -> None:
    """Fills the output: with `coding` it is codes, and has scales."""
    num_rows, width = inputs.shape
    if norm is not None:
        check_norm(norm, "norm", inputs)
    if update_norm is not None:
        check_norm(update_norm, "update_norm", inputs)
    if output.numel() == 0:
        return
    tile = norm_tile(width)
    group = None
    if coding is not None:
        group = tile["TILE_WIDTH"] if coding.group is None else min(coding.group, tile["TILE_WIDTH"])
    _row_norm_kernel[(ceil_div(num_rows, tile["TILE_ROWS"]),)](
        output,
        scales,
        inputs,
        update,
        None if norm is None else norm.weight,
        None if norm is None else norm.bias,
        None if update_norm is None else update_norm.weight,
        None if update_norm is None else update_norm.bias,
        num_rows,
        0.0 if norm is None else norm.epsilon,
        0.0 if update_norm is None else update_norm.epsilon,
        sum_scale,
        inputs.stride(0),
        0 if update is None else update.stride(0),
        WIDTH=width,
        CENTERED=norm is not None and norm.is_centered,
        UPDATE_CENTERED=update_norm is not None and update_norm.is_centered,
        NORM_FIRST=norm_first,
        GROUP=group,
        MAX_CODE=None if coding is None else MAX_CODES[coding.dtype],
        **tile,
    )


def norm_tile(width: int) -> dict[str, int]:
    """The tile of a program around `normalize`, and its num_warps."""
    tile_width = next_power_of_2(width)
    # Up to 16 elements a thread, as far as a block's threads go
    num_warps = min(16, max(4, tile_width // 512))
    return {"TILE_ROWS": max(1, _TILE // tile_width), "TILE_WIDTH": tile_width, "num_warps": num_warps}


def row_norm_reference(inputs: Tensor, norm: RowNorm, dtype: torch.dtype | None = None) -> Tensor:
    """`row_norm` in plain torch, of inputs of any shape [..., width]."""
    rows = inputs.float()
    if norm.is_centered:
        rows = rows - rows.mean(-1, keepdim=True)
    normed = rows * (rows.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt() * norm.weight.float()
    if norm.bias is not None:
        normed = normed + norm.bias.float()
    return normed.to(dtype or norm.weight.dtype)


def add_row_norm_reference(
    hidden: Tensor,
    update: Tensor | None,
    norm: RowNorm | None,
    dtype: torch.dtype | None = None,
    *,
    update_norm: RowNorm | None = None,
    norm_first: bool = False,
    sum_scale: float | None = None,
) -> Tensor:
    """`add_row_norm` in plain torch."""
    before = hidden.clone() if norm_first else hidden
    if update is not None:
        hidden += update if update_norm is None else row_norm_reference(update, update_norm, torch.float32)
        if sum_scale is not None:
            hidden *= sum_scale
    return before.to(dtype or before.dtype, copy=True) if norm is None else row_norm_reference(before, norm, dtype)


def add_row_norm_codes_reference(
    hidden: Tensor,
    update: Tensor | None,
    norm: RowNorm | None,
    coding: RowCoding,
    *,
    update_norm: RowNorm | None = None,
    norm_first: bool = False,
    sum_scale: float | None = None,
) -> CodedRows:
    """`add_row_norm_codes` in plain torch."""
    how: dict[str, Any] = {"update_norm": update_norm, "norm_first": norm_first, "sum_scale": sum_scale}
    normed = add_row_norm_reference(hidden, update, norm, torch.float32, **how)
    return code_rows_reference(normed, coding)


def check_sum(hidden: Tensor, update: Tensor | None, sum_scale: float | None = None) -> None:
    """The residual stream is float32, and the update has its shape; without one there is no scale."""
    check_rows(hidden, "hidden", [torch.float32])
    if update is not None:
        check_rows(update, "update")
        require(update.shape == hidden.shape, "update", "have the shape of hidden")
        require(update.device == hidden.device, "update", "be on the device of hidden")
    require(update is not None or sum_scale is None, "sum_scale", "come with an update")


def check_norm(norm: RowNorm, argument: str, inputs: Tensor) -> None:
    """The norm's vectors must be of the width of `inputs` and on its device."""
    width = inputs.shape[1]
    for vector, field in ((norm.weight, "weight"), (norm.bias, "bias")):
        if vector is not None:
            name = f"{argument}.{field}"
            require(vector.dtype in FLOAT_DTYPES, name, "be float32, float16 or bfloat16")
            check_vector(vector, name, width, vector.dtype, inputs.device)
    require(width <= _MAX_WIDTH, f"{argument}.weight", f"be at most {_MAX_WIDTH} wide")
