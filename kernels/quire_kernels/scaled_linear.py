"""Matrix products of rows in codes with weights in codes, of int8 or of float8_e4m3fn; also with those of the rows'
experts (`group_by_expert`).

Sums of int8 are whole numbers: they have the same bits in any tiles. Those of float8 are added up in float32 after each
tile of inputs, since the matrix instructions of some GPUs keep fewer bits; they are the same for any number of rows if
tiles are.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, QUANTIZED_DTYPES, require
from quire_kernels._device import device_limits, pipeline_stages
from quire_kernels._shapes import SCALED_GROUP, ceil_div, check_rows, check_vector
from quire_kernels.coded_rows import CodedRows, RowCoding
from quire_kernels.group_by_expert import ExpertGroups
from quire_kernels.grouped_linear import (
    check_expert_bias,
    check_row_groups,
    choose_tile_rows,
    grouped_products,
    tile_of_rows,
)
from quire_kernels.invariant_linear import choose_tile_outputs, store_products

_TILE_INPUTS = SCALED_GROUP
# torch's products of float8 take whole units of these many inputs and outputs.
_TORCH_UNIT = 16


class CodedMatrix(NamedTuple):
    """A weight in codes of 8 bits: a number is its code times the scale of its output, or of its group of inputs."""

    codes: Tensor
    """int8 or float8_e4m3fn [outputs, inputs], last dimension contiguous; of experts [experts, outputs, inputs]."""
    scales: Tensor
    """float32 [groups, outputs], contiguous: one group, or one for each SCALED_GROUP inputs; of experts [experts,
    groups, outputs].
    """

    @property
    def num_groups(self) -> int:
        return self.scales.shape[-2]

    @property
    def coding(self) -> RowCoding:
        """How the rows that it is multiplied with are coded."""
        return RowCoding(self.codes.dtype, None if self.num_groups == 1 else SCALED_GROUP)

    def of_expert(self, expert: int) -> "CodedMatrix":
        return CodedMatrix(self.codes[expert], self.scales[expert])

    def dense(self) -> Tensor:
        """The numbers, float32 [outputs, inputs]."""
        if self.num_groups == 1:
            return self.codes.float() * self.scales.t()
        return self.codes.float() * self.scales.t().repeat_interleave(SCALED_GROUP, 1)[:, : self.codes.shape[1]]


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _scaled_linear_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_codes,
    p_row_scales,
    p_weight,
    p_weight_scales,
    p_bias,
    p_order,
    p_tile_experts,
    num_rows,
    stride_output,
    stride_codes,
    stride_expert,
    stride_weight,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS_PER_INPUT: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_INT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """With more than one group, TILE_K inputs are a group."""
    # Tiles of rows are neighbours in a launch, so that each tile of the weight comes from memory once
    o_row, m_row, expert = tile_of_rows(p_order, p_tile_experts, num_rows, TILE_M)
    if expert < 0:
        return
    o_output = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    m_output = o_output < OUTPUTS
    o_read = o_row // ROWS_PER_INPUT
    p_row = p_codes + o_read[:, None] * stride_codes
    p_column = p_weight + expert * stride_expert + o_output.to(tl.int64)[:, None] * stride_weight
    p_row_scale = p_row_scales + o_read * GROUPS
    p_weight_scales += expert * GROUPS * OUTPUTS
    if p_bias is not None:
        p_bias += expert * OUTPUTS
    sum_dtype: tl.constexpr = tl.int32 if IS_INT else tl.float32
    b_total = tl.zeros([TILE_M, TILE_N], sum_dtype)
    b_sum = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, INPUTS, TILE_K):
        o_input = start + tl.arange(0, TILE_K)
        m_input = o_input < INPUTS
        # [TILE_M, TILE_K]
        b_codes = tl.load(p_row + o_input[None, :], mask=m_row[:, None] & m_input[None, :], other=0.0)
        # [TILE_N, TILE_K]
        b_weight = tl.load(p_column + o_input[None, :], mask=m_output[:, None] & m_input[None, :], other=0.0)
        if GROUPS == 1:
            if IS_INT:
                b_total = tl.dot(b_codes, tl.trans(b_weight), b_total, out_dtype=tl.int32)
            else:
                b_total += tl.dot(b_codes, tl.trans(b_weight), max_num_imprecise_acc=TILE_K)
        else:
            if IS_INT:
                b_part = tl.dot(b_codes, tl.trans(b_weight), out_dtype=tl.int32).to(tl.float32)
            else:
                b_part = tl.dot(b_codes, tl.trans(b_weight), max_num_imprecise_acc=TILE_K)
            group = start // TILE_K
            b_row_scales = tl.load(p_row_scale + group, mask=m_row, other=0.0)
            b_scales = tl.load(p_weight_scales + group * OUTPUTS + o_output, mask=m_output, other=0.0)
            b_sum += b_part * (b_row_scales[:, None] * b_scales[None, :])
    if GROUPS == 1:
        b_row_scales = tl.load(p_row_scale, mask=m_row, other=0.0)
        b_scales = tl.load(p_weight_scales + o_output, mask=m_output, other=0.0)
        b_sum = b_total.to(tl.float32) * b_row_scales[:, None] * b_scales[None, :]
    store_products(b_sum, p_output, p_bias, o_row, m_row, o_output, m_output, stride_output)


def scaled_linear(
    rows: CodedRows, weight: CodedMatrix, bias: Tensor | None, dtype: torch.dtype, *, deterministic: bool = False
) -> Tensor:
    """The rows times the weight's transpose, and the bias added; sums are float32 and rounded once.

    torch computes products of float8 with one scale for each row and output, where it does; Quire's kernel all others.

    Args:
        rows: of the coding that the weight names.
        bias: [outputs] of the dtype of the result, contiguous; None for none.
        dtype: of the result: float32, float16 or bfloat16.
        deterministic: a row comes to the same bits, however many there are.

    Returns:
        [num_rows, outputs], contiguous.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    _check(rows, weight, bias, dtype)
    num_rows, outputs = len(rows.codes), len(weight.codes)
    if num_rows and not deterministic and _torch_multiplies(rows, weight, dtype):
        return F.scaled_mm(
            rows.codes,
            weight.codes.t(),
            rows.scales,
            F.ScalingType.RowWise,
            weight.scales,
            F.ScalingType.RowWise,
            bias=bias,
            output_dtype=dtype,
        )
    out = torch.empty((num_rows, outputs), dtype=dtype, device=rows.codes.device)
    if out.numel() == 0:
        return out
    # Codes are of 8 bits, whatever the dtype of the result.
    tile_rows = choose_tile_rows(num_rows, 1, rows.codes.dtype, deterministic=deterministic)
    _launch(out, rows, weight, bias, None, tile_rows)
    return out


def grouped_scaled_linear(
    rows: CodedRows,
    weight: CodedMatrix,
    groups: ExpertGroups,
    num_rows: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Each row times the transpose of its expert's weight, and its bias added; sums are float32 and rounded once.

    Args:
        rows: of the coding that the weight names. Row r reads input r // (num_rows / their number).
        weight: of experts.
        groups: of the rows, in tiles of at least 16.
        num_rows: a multiple of the number of inputs.
        dtype: of the result: float32, float16 or bfloat16.
        bias: [experts, outputs] of that dtype, contiguous; None for none.

    Returns:
        [num_rows, outputs], contiguous.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype, stride or device.
    """
    out = _grouped_output(rows, weight, groups, num_rows, dtype, bias)
    if out.numel():
        _launch(out, rows, weight, bias, groups, groups.tile_rows)
    return out


def _launch(
    out: Tensor,
    rows: CodedRows,
    weight: CodedMatrix,
    bias: Tensor | None,
    groups: ExpertGroups | None,
    tile_rows: int,
) -> None:
    num_rows, outputs = out.shape
    num_tiles = ceil_div(num_rows, tile_rows) if groups is None else len(groups.tile_experts)
    tile_n = choose_tile_outputs(outputs, device_limits(out.device).multiprocessors)
    _scaled_linear_kernel[(num_tiles, ceil_div(outputs, tile_n))](
        out,
        *rows,
        *weight,
        bias,
        None if groups is None else groups.order,
        None if groups is None else groups.tile_experts,
        num_rows,
        out.stride(0),
        rows.codes.stride(0),
        0 if groups is None else weight.codes.stride(0),
        weight.codes.stride(-2),
        OUTPUTS=outputs,
        INPUTS=rows.codes.shape[1],
        ROWS_PER_INPUT=num_rows // len(rows.codes),
        GROUPS=weight.num_groups,
        IS_INT=weight.codes.dtype == torch.int8,
        TILE_M=tile_rows,
        TILE_N=tile_n,
        TILE_K=_TILE_INPUTS,
        num_warps=4,
        num_stages=pipeline_stages((tile_rows + tile_n) * _TILE_INPUTS, out.device),
    )


def scaled_linear_reference(rows: CodedRows, weight: CodedMatrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`scaled_linear` in plain torch."""
    _check(rows, weight, bias, dtype)
    product = rows.decoded(weight.coding.group) @ weight.dense().t()
    return (product if bias is None else product + bias.float()).to(dtype)


def grouped_scaled_linear_reference(
    rows: CodedRows,
    weight: CodedMatrix,
    groups: ExpertGroups,
    num_rows: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """`grouped_scaled_linear` in plain torch, tile by tile."""
    out = _grouped_output(rows, weight, groups, num_rows, dtype, bias)
    numbers = rows.decoded(weight.coding.group)

    def multiply(expert: int, input_rows: Tensor) -> Tensor:
        product = numbers[input_rows] @ weight.of_expert(expert).dense().t()
        return product if bias is None else product + bias[expert].float()

    return grouped_products(groups, len(numbers), num_rows, out, multiply)


def _grouped_output(
    rows: CodedRows,
    weight: CodedMatrix,
    groups: ExpertGroups,
    num_rows: int,
    dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """Memory for the result, if all is well."""
    fits = weight.codes.ndim == weight.scales.ndim == 3 and len(weight.codes) == len(weight.scales) > 0
    require(fits, "weight", "be of experts")
    require(weight.scales.is_contiguous(), "weight", "have contiguous scales of float32")
    _check(rows, weight.of_expert(0), None, dtype)
    check_row_groups(groups, num_rows, rows.codes)
    num_experts, outputs = weight.codes.shape[:2]
    check_expert_bias(bias, (num_experts, outputs), dtype, rows.codes.device)
    return torch.empty((num_rows, outputs), dtype=dtype, device=rows.codes.device)


def _torch_multiplies(rows: CodedRows, weight: CodedMatrix, dtype: torch.dtype) -> bool:
    outputs, inputs = weight.codes.shape
    return (
        rows.codes.device.type == "cuda"
        and torch.version.hip is None  # there float8 has other numbers
        and rows.codes.dtype == torch.float8_e4m3fn
        and dtype == torch.bfloat16
        and len(weight.scales) == 1
        and outputs % _TORCH_UNIT == 0
        and inputs % _TORCH_UNIT == 0
    )


def _check(rows: CodedRows, weight: CodedMatrix, bias: Tensor | None, dtype: torch.dtype) -> None:
    check_rows(weight.codes, "weight", QUANTIZED_DTYPES)
    (outputs, inputs), device = weight.codes.shape, weight.codes.device
    num_groups = len(weight.scales)
    require(
        num_groups in (1, ceil_div(inputs, SCALED_GROUP)),
        "weight",
        f"have a scale for each {SCALED_GROUP} inputs, or for all",
    )
    _check_scales(weight.scales, "weight", (num_groups, outputs), device)
    check_rows(rows.codes, "rows", [weight.codes.dtype])
    require(rows.codes.device == device, "rows", f"be on {device}")
    require(rows.codes.shape[1] == inputs, "rows", f"be {inputs} wide")
    _check_scales(rows.scales, "rows", (len(rows.codes), num_groups), device)
    require(dtype in FLOAT_DTYPES, "dtype", "be float32, float16 or bfloat16")
    if bias is not None:
        check_vector(bias, "bias", outputs, dtype, device)


def _check_scales(scales: Tensor, argument: str, shape: tuple[int, int], device: torch.device) -> None:
    if scales.shape != shape:
        require(False, argument, f"have scales {list(shape)}, not {list(scales.shape)}")
    require(scales.dtype == torch.float32 and scales.is_contiguous(), argument, "have contiguous scales of float32")
    require(scales.device == device, argument, f"have scales on {device}")
