"""Matrix products with weights in 8 or 4 bits, and inputs as they are: codes become numbers of the inputs' dtype in the
registers of the multiprocessor that multiplies them. Also with the weights of the rows' experts (`group_by_expert`).

An output is one sum over the inputs in tiles of their order.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, require
from quire_kernels._device import device_limits, pipeline_stages
from quire_kernels._shapes import ceil_div, check_rows, check_vector
from quire_kernels.cpu.nibbles import GROUP_SIZES
from quire_kernels.group_by_expert import ExpertGroups
from quire_kernels.grouped_linear import check_row_groups, choose_tile_rows, grouped_products, tile_of_rows
from quire_kernels.invariant_linear import choose_tile_outputs, store_products

# Two halves of 32 inputs: of 4 bits, a byte has an input of the first half, and above it that of the second.
_TILE_INPUTS, _HALF = 64, 32


class GroupScales(NamedTuple):
    """Numbers of groups: each is a float16 times a power of two of its output, so that small ones keep their bits."""

    values: Tensor
    """float16 [groups, outputs]."""
    factors: Tensor
    """float32 [outputs]."""

    def dense(self) -> Tensor:
        """float32 [groups, outputs]."""
        return self.values.float() * self.factors


class WeightOnlyMatrix(NamedTuple):
    """A weight [outputs, inputs] in codes. A number is code x scale of its output; in groups of inputs it is
    (code - zero) x scale of its group, or code x scale + minimum. Of experts, each tensor has a first dimension more.
    """

    codes: Tensor
    """int8 [outputs, inputs]; or uint8 [outputs, inputs / 2, rounded up to 32]: 4 bits, as `pack_halves` has them."""
    inputs: int
    scales: Tensor | GroupScales
    """float32 [outputs], or those of groups."""
    group: int | None = None
    """How many neighbouring inputs have one scale, one of GROUP_SIZES; the last group may have fewer."""
    zeros: Tensor | None = None
    """float16 [groups, outputs]."""
    minimums: GroupScales | None = None

    @property
    def coding(self) -> None:
        """Rows that it is multiplied with are not coded."""

    def of_expert(self, expert: int) -> "WeightOnlyMatrix":
        def one(scales: GroupScales) -> GroupScales:
            return GroupScales(scales.values[expert], scales.factors[expert])

        return WeightOnlyMatrix(
            self.codes[expert],
            self.inputs,
            one(self.scales) if isinstance(self.scales, GroupScales) else self.scales[expert],
            self.group,
            None if self.zeros is None else self.zeros[expert],
            None if self.minimums is None else one(self.minimums),
        )

    def dense(self) -> Tensor:
        """The numbers, float32 [outputs, inputs]."""
        codes = self.codes.float() if self.codes.dtype == torch.int8 else _unpacked(self.codes, self.inputs).float()
        if not isinstance(self.scales, GroupScales):
            return codes * self.scales[:, None]
        groups = torch.arange(self.inputs, device=codes.device) // (self.group or self.inputs)
        if self.zeros is not None:
            codes = codes - self.zeros.float()[groups].t()
        numbers = codes * self.scales.dense()[groups].t()
        return numbers if self.minimums is None else numbers + self.minimums.dense()[groups].t()


def pack_halves(codes: Tensor) -> Tensor:
    """Codes of 4 bits, uint8 [outputs, inputs], two in a byte: input i of each 64 has the low bits of byte i, input
    32 + i the high ones. Returns uint8 [outputs, 32 for each 64 inputs]; what is missing of them is 0.
    """
    outputs, inputs = codes.shape
    padded = F.pad(codes, (0, -inputs % _TILE_INPUTS)).view(outputs, -1, 2, _HALF)
    return (padded[:, :, 0] | padded[:, :, 1] << 4).flatten(1).contiguous()


def _unpacked(packed: Tensor, inputs: int) -> Tensor:
    halves = packed.view(len(packed), -1, _HALF)
    return torch.stack((halves & 15, halves >> 4), 2).flatten(1)[:, :inputs]


@triton.jit  # type: ignore[untyped-decorator]
def _dequantized(  # type: ignore[no-untyped-def]
    b_numbers,
    p_scales,
    p_zeros,
    p_minimums,
    b_factors,
    b_minimum_factors,
    first,
    o_output,
    m_output,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """float32 numbers [outputs, WIDTH] of the codes of inputs `first` and following, which have groups."""
    # The inputs of a half are of one group, or of a few; those of the last half may be beyond the last group.
    if GROUP >= WIDTH:
        group = first // GROUP
        o_group = group * OUTPUTS + o_output[:, None]
        m_group = m_output[:, None] & (group < GROUPS)
    else:
        group = (first + tl.arange(0, WIDTH)) // GROUP
        o_group = group[None, :] * OUTPUTS + o_output[:, None]
        m_group = m_output[:, None] & (group < GROUPS)[None, :]
    if p_zeros is not None:
        b_numbers -= tl.load(p_zeros + o_group, mask=m_group, other=0.0).to(tl.float32)
    b_numbers *= tl.load(p_scales + o_group, mask=m_group, other=0.0).to(tl.float32) * b_factors[:, None]
    if p_minimums is not None:
        b_numbers += tl.load(p_minimums + o_group, mask=m_group, other=0.0).to(tl.float32) * b_minimum_factors[:, None]
    return b_numbers


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _weight_only_linear_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_inputs,
    p_codes,
    p_factors,
    p_scales,
    p_zeros,
    p_minimums,
    p_minimum_factors,
    p_bias,
    p_order,
    p_tile_experts,
    num_rows,
    stride_output,
    stride_inputs,
    stride_expert,
    stride_codes,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS_PER_INPUT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    IN_4_BITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    HALF: tl.constexpr,
):
    # Tiles of rows are neighbours in a launch, so that each tile of the weight comes from memory once
    o_row, m_row, expert = tile_of_rows(p_order, p_tile_experts, num_rows, TILE_M)
    if expert < 0:
        return
    o_output = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    m_output = o_output < OUTPUTS
    p_row = p_inputs + (o_row // ROWS_PER_INPUT)[:, None] * stride_inputs
    p_column = p_codes + expert * stride_expert + o_output.to(tl.int64)[:, None] * stride_codes
    p_factors += expert * OUTPUTS
    if GROUP is not None:
        p_scales += expert * GROUPS * OUTPUTS
    if p_zeros is not None:
        p_zeros += expert * GROUPS * OUTPUTS
    if p_minimums is not None:
        p_minimums += expert * GROUPS * OUTPUTS
        p_minimum_factors += expert * OUTPUTS
    o_half = tl.arange(0, HALF)
    b_factors = tl.load(p_factors + o_output, mask=m_output, other=0.0)
    b_minimum_factors = b_factors
    if p_minimums is not None:
        b_minimum_factors = tl.load(p_minimum_factors + o_output, mask=m_output, other=0.0)
    b_sum = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, INPUTS, 2 * HALF):
        if IN_4_BITS:
            # [TILE_N, HALF]
            b_pairs = tl.load(p_column + start // 2 + o_half[None, :], mask=m_output[:, None], other=0)
        for half in tl.static_range(2):
            first = start + half * HALF
            o_input = first + o_half
            m_input = o_input < INPUTS
            # [TILE_M, HALF]
            b_inputs = tl.load(p_row + o_input[None, :], mask=m_row[:, None] & m_input[None, :], other=0.0)
            if IN_4_BITS:
                b_codes = (b_pairs >> 4) if half == 1 else (b_pairs & 15)
            else:
                b_codes = tl.load(p_column + o_input[None, :], mask=m_output[:, None] & m_input[None, :], other=0)
            b_weight = b_codes.to(tl.float32)
            if GROUP is not None:
                b_weight = _dequantized(
                    b_weight,
                    p_scales,
                    p_zeros,
                    p_minimums,
                    b_factors,
                    b_minimum_factors,
                    first,
                    o_output,
                    m_output,
                    OUTPUTS,
                    GROUPS,
                    GROUP,
                    HALF,
                )
            b_sum = tl.dot(b_inputs, tl.trans(b_weight.to(b_inputs.dtype)), b_sum, input_precision="ieee")
    if GROUP is None:
        b_sum *= b_factors[None, :]
    store_products(b_sum, p_output, p_bias, o_row, m_row, o_output, m_output, stride_output)


def weight_only_linear(
    inputs: Tensor, weight: WeightOnlyMatrix, bias: Tensor | None = None, *, deterministic: bool = False
) -> Tensor:
    """`inputs` times the weight's transpose, and the bias added; sums are float32 and rounded once.

    Numbers of groups are rounded to the dtype of `inputs` before they are multiplied. Codes with one scale for each
    output are multiplied as they are, and their sums scaled.

    Args:
        inputs: [rows, inputs], last dimension contiguous.
        bias: [outputs] of the same dtype, contiguous; None for none.
        deterministic: a row comes to the same bits, however many there are.

    Returns:
        [rows, outputs], contiguous, of the dtype of `inputs`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    _check(inputs, weight, bias)
    num_rows, outputs = len(inputs), len(weight.codes)
    out = torch.empty((num_rows, outputs), dtype=inputs.dtype, device=inputs.device)
    if out.numel() == 0:
        return out
    # As in `grouped_linear`
    tile_rows = choose_tile_rows(num_rows, 1, inputs.dtype, deterministic=deterministic)
    _launch(out, inputs, weight, bias, None, tile_rows)
    return out


def grouped_weight_only_linear(inputs: Tensor, weight: WeightOnlyMatrix, groups: ExpertGroups, num_rows: int) -> Tensor:
    """Each row times the transpose of its expert's weight, as `weight_only_linear` multiplies.

    Args:
        inputs: [num_inputs, inputs], last dimension contiguous. Row r reads input r // (num_rows / num_inputs).
        weight: of experts.
        groups: of the rows, in tiles of at least 16.
        num_rows: a multiple of num_inputs.

    Returns:
        [num_rows, outputs], contiguous, of the dtype of `inputs`.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype, stride or device.
    """
    out = _grouped_output(inputs, weight, groups, num_rows)
    if out.numel():
        _launch(out, inputs, weight, None, groups, groups.tile_rows)
    return out


def _launch(
    out: Tensor,
    inputs: Tensor,
    weight: WeightOnlyMatrix,
    bias: Tensor | None,
    groups: ExpertGroups | None,
    tile_rows: int,
) -> None:
    num_rows, outputs = out.shape
    num_tiles = ceil_div(num_rows, tile_rows) if groups is None else len(groups.tile_experts)
    tile_n = choose_tile_outputs(outputs, device_limits(out.device).multiprocessors)
    in_groups = isinstance(weight.scales, GroupScales)
    _weight_only_linear_kernel[(num_tiles, ceil_div(outputs, tile_n))](
        out,
        inputs,
        weight.codes,
        weight.scales.factors if isinstance(weight.scales, GroupScales) else weight.scales,
        weight.scales.values if isinstance(weight.scales, GroupScales) else None,
        weight.zeros,
        None if weight.minimums is None else weight.minimums.values,
        None if weight.minimums is None else weight.minimums.factors,
        bias,
        None if groups is None else groups.order,
        None if groups is None else groups.tile_experts,
        num_rows,
        out.stride(0),
        inputs.stride(0),
        0 if groups is None else weight.codes.stride(0),
        weight.codes.stride(-2),
        OUTPUTS=outputs,
        INPUTS=weight.inputs,
        ROWS_PER_INPUT=num_rows // len(inputs),
        GROUPS=ceil_div(weight.inputs, weight.group) if in_groups and weight.group is not None else 1,
        GROUP=weight.group,
        IN_4_BITS=weight.codes.dtype == torch.uint8,
        TILE_M=tile_rows,
        TILE_N=tile_n,
        HALF=_HALF,
        num_warps=4,
        num_stages=pipeline_stages((tile_rows * inputs.dtype.itemsize + tile_n) * _TILE_INPUTS, out.device),
    )


def weight_only_linear_reference(inputs: Tensor, weight: WeightOnlyMatrix, bias: Tensor | None = None) -> Tensor:
    """`weight_only_linear` in plain torch."""
    _check(inputs, weight, bias)
    numbers = weight.dense() if weight.group is None else weight.dense().to(inputs.dtype).float()
    return F.linear(inputs.float(), numbers, None if bias is None else bias.float()).to(inputs.dtype)


def grouped_weight_only_linear_reference(
    inputs: Tensor, weight: WeightOnlyMatrix, groups: ExpertGroups, num_rows: int
) -> Tensor:
    """`grouped_weight_only_linear` in plain torch, tile by tile."""
    out = _grouped_output(inputs, weight, groups, num_rows)
    return grouped_products(
        groups,
        len(inputs),
        num_rows,
        out,
        lambda expert, input_rows: weight_only_linear_reference(inputs[input_rows], weight.of_expert(expert)),
    )


def _grouped_output(inputs: Tensor, weight: WeightOnlyMatrix, groups: ExpertGroups, num_rows: int) -> Tensor:
    """Memory for the result, if all is well."""
    require(weight.codes.ndim == 3 and len(weight.codes) > 0, "weight", "be of experts")
    _check(inputs, weight.of_expert(0), None)
    check_row_groups(groups, num_rows, inputs)
    return torch.empty((num_rows, weight.codes.shape[1]), dtype=inputs.dtype, device=inputs.device)


def _check(inputs: Tensor, weight: WeightOnlyMatrix, bias: Tensor | None) -> None:
    check_rows(inputs, "inputs", FLOAT_DTYPES)
    check_rows(weight.codes, "weight", [torch.int8, torch.uint8])
    device, (outputs, width) = weight.codes.device, weight.codes.shape
    in_4_bits = weight.codes.dtype == torch.uint8
    needed = ceil_div(weight.inputs, _TILE_INPUTS) * _HALF if in_4_bits else weight.inputs
    require(width == needed, "weight", f"have codes [{outputs}, {needed}], not {list(weight.codes.shape)}")
    require(inputs.device == device, "inputs", f"be on {device}")
    require(inputs.shape[1] == weight.inputs, "inputs", f"be {weight.inputs} wide")
    in_groups = isinstance(weight.scales, GroupScales)
    require((weight.group is not None) == in_groups, "weight", "have scales of groups, and their size, or neither")
    if isinstance(weight.scales, GroupScales) and weight.group is not None:
        require(weight.group in GROUP_SIZES, "weight", f"have groups of {GROUP_SIZES} inputs")
        num_groups = ceil_div(weight.inputs, weight.group)
        _check_groups(weight.scales, num_groups, outputs, device)
        if weight.minimums is not None:
            _check_groups(weight.minimums, num_groups, outputs, device)
        if weight.zeros is not None:
            _check_values(weight.zeros, num_groups, outputs, device)
    else:
        assert isinstance(weight.scales, Tensor)
        require(not in_4_bits, "weight", "have groups where codes have 4 bits")
        require(weight.zeros is None and weight.minimums is None, "weight", "have groups where it has zero points")
        check_vector(weight.scales, "weight", outputs, torch.float32, device)
    if bias is not None:
        check_vector(bias, "bias", outputs, inputs.dtype, device)


def _check_groups(scales: GroupScales, num_groups: int, outputs: int, device: torch.device) -> None:
    _check_values(scales.values, num_groups, outputs, device)
    check_vector(scales.factors, "weight", outputs, torch.float32, device)


def _check_values(values: Tensor, num_groups: int, outputs: int, device: torch.device) -> None:
    fits = values.shape == (num_groups, outputs) and values.dtype == torch.float16 and values.is_contiguous()
    require(fits and values.device == device, "weight", f"have float16 [{num_groups}, {outputs}] of its groups")
