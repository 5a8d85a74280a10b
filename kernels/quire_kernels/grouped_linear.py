"""Matrix products of a step's rows with the matrices of their experts, and the gated activation between two of them.

A tile of rows has one expert (`group_by_expert`). An output is one sum over the inputs in tiles of their order: a row's
bits depend on the size of tiles, not on the other rows.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._device import pipeline_stages
from quire_kernels._shapes import ceil_div, check_rows
from quire_kernels.activation import Activation, gated, gated_activation_reference
from quire_kernels.group_by_expert import ExpertGroups
from quire_kernels.invariant_linear import store_products

# The rows of tiles: the fewest that matrix instructions take, and as many as one of Hopper's takes. There are two sizes
# only, so that the first steps of a worker compile the kernels of both.
_FEW_ROWS, _MANY_ROWS = 16, 64
# The only one in float32, whose products run without tensor cores.
_TILE_ROWS_EXACT = 32


@triton.jit  # type: ignore[untyped-decorator]
def tile_of_rows(p_order, p_tile_experts, num_rows, TILE_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of a program's tile [TILE_M], whether each is one, and their expert: less than 0 where the tile is not
    used. Without `p_order`, rows are in order, and of no expert.
    """
    tile = tl.program_id(0)
    if p_order is None:
        o_row = (tile * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
        m_row = o_row < num_rows
        expert = tl.zeros([], tl.int64)
    else:
        o_row = tl.load(p_order + tile * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
        m_row = o_row >= 0
        expert = tl.load(p_tile_experts + tile).to(tl.int64)
    return o_row, m_row, expert


@triton.jit  # type: ignore[untyped-decorator]
def _grouped_linear_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_inputs,
    p_weight,
    p_bias,
    p_order,
    p_tile_experts,
    stride_output,
    stride_inputs,
    stride_expert,
    stride_weight,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS_PER_INPUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    # Tiles of rows are neighbours in a launch, so that each tile of an expert's weight comes from memory once
    o_row, m_row, expert = tile_of_rows(p_order, p_tile_experts, 0, TILE_M)
    if expert < 0:
        return
    o_output = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    m_output = o_output < OUTPUTS
    p_row = p_inputs + (o_row // ROWS_PER_INPUT)[:, None] * stride_inputs
    p_column = p_weight + expert * stride_expert + o_output.to(tl.int64)[:, None] * stride_weight
    b_sum = tl.zeros([TILE_M, TILE_N], tl.float32)
    b_up = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, INPUTS, TILE_K):
        o_input = start + tl.arange(0, TILE_K)
        m_input = o_input < INPUTS
        m_weight = m_output[:, None] & m_input[None, :]
        # [TILE_M, TILE_K]
        b_inputs = tl.load(p_row + o_input[None, :], mask=m_row[:, None] & m_input[None, :], other=0.0)
        # [TILE_N, TILE_K]
        b_weight = tl.load(p_column + o_input[None, :], mask=m_weight, other=0.0)
        b_sum = tl.dot(b_inputs, tl.trans(b_weight), b_sum, input_precision="ieee")
        if ACTIVATION is not None:
            b_weight = tl.load(p_column + OUTPUTS * stride_weight + o_input[None, :], mask=m_weight, other=0.0)
            b_up = tl.dot(b_inputs, tl.trans(b_weight), b_up, input_precision="ieee")
    if p_bias is not None:
        p_bias += expert * (OUTPUTS if ACTIVATION is None else 2 * OUTPUTS)
    if ACTIVATION is None:
        store_products(b_sum, p_output, p_bias, o_row, m_row, o_output, m_output, stride_output)
    else:
        if p_bias is not None:
            b_sum += tl.load(p_bias + o_output, mask=m_output, other=0.0).to(tl.float32)[None, :]
            b_up += tl.load(p_bias + OUTPUTS + o_output, mask=m_output, other=0.0).to(tl.float32)[None, :]
        b_sum = gated(b_sum, b_up, ACTIVATION)
        store_products(b_sum, p_output, None, o_row, m_row, o_output, m_output, stride_output)


def grouped_linear(
    inputs: Tensor,
    weight: Tensor,
    groups: ExpertGroups,
    num_rows: int,
    activation: Activation | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Each row times the transpose of its expert's weight, and its bias added; sums are float32 and rounded once.

    Args:
        inputs: [num_inputs, in_features], last dimension contiguous. Row r reads input r // (num_rows / num_inputs):
            the rows of a token with its experts read the same input, or each its own.
        weight: [num_experts, out_features, in_features] of the dtype of `inputs`, last dimension contiguous.
        groups: of the rows, in tiles of at least 16.
        num_rows: a multiple of num_inputs.
        activation: with it the weight holds gate and up side by side, and the output is the activation of the gate
            times up, computed in float32.
        bias: [num_experts, out_features] of the dtype of `inputs`, contiguous; None for none.

    Returns:
        [num_rows, out_features], with an activation half as wide, contiguous, of the dtype of `inputs`.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype, stride or device.
    """
    outputs = _check(inputs, weight, groups, num_rows, activation, bias)
    out = torch.empty((num_rows, outputs), dtype=inputs.dtype, device=inputs.device)
    if out.numel() == 0:
        return out
    is_exact = inputs.dtype == torch.float32
    tile_n, tile_k = 64 if is_exact or activation is not None else 128, 32 if is_exact else 64
    num_columns = tile_n if activation is None else 2 * tile_n
    _grouped_linear_kernel[(len(groups.tile_experts), ceil_div(outputs, tile_n))](
        out,
        inputs,
        weight,
        bias,
        groups.order,
        groups.tile_experts,
        out.stride(0),
        inputs.stride(0),
        weight.stride(0),
        weight.stride(1),
        OUTPUTS=outputs,
        INPUTS=inputs.shape[1],
        ROWS_PER_INPUT=num_rows // len(inputs),
        ACTIVATION=None if activation is None else activation.value,
        TILE_M=groups.tile_rows,
        TILE_N=tile_n,
        TILE_K=tile_k,
        num_warps=4,
        num_stages=pipeline_stages((groups.tile_rows + num_columns) * tile_k * inputs.dtype.itemsize, inputs.device),
    )
    return out


def grouped_linear_reference(
    inputs: Tensor,
    weight: Tensor,
    groups: ExpertGroups,
    num_rows: int,
    activation: Activation | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`grouped_linear` in plain torch, tile by tile."""
    outputs = _check(inputs, weight, groups, num_rows, activation, bias)
    out = torch.empty((num_rows, outputs), dtype=inputs.dtype, device=inputs.device)

    def multiply(expert: int, input_rows: Tensor) -> Tensor:
        product = inputs[input_rows].float() @ weight[expert].float().t()
        if bias is not None:
            product += bias[expert].float()
        return product if activation is None else gated_activation_reference(product, activation)

    return grouped_products(groups, len(inputs), num_rows, out, multiply)


def choose_tile_rows(num_rows: int, num_experts: int, dtype: torch.dtype, *, deterministic: bool) -> int:
    """The rows of a tile for so many rows in a step; with `deterministic` always the same."""
    if dtype == torch.float32:
        return _TILE_ROWS_EXACT
    if deterministic:
        return _MANY_ROWS
    return _FEW_ROWS if num_rows <= _FEW_ROWS * num_experts else _MANY_ROWS


def check_row_groups(groups: ExpertGroups, num_rows: int, inputs: Tensor) -> None:
    """The groups of so many rows that read these inputs."""
    require(groups.order.device == inputs.device, "groups", f"be on {inputs.device}")
    require(groups.tile_rows >= _FEW_ROWS, "groups", f"have tiles of at least {_FEW_ROWS} rows")
    has_whole = num_rows % len(inputs) == 0 if len(inputs) else num_rows == 0
    require(has_whole, "num_rows", f"be a multiple of {len(inputs)} inputs")


def grouped_products(
    groups: ExpertGroups, num_inputs: int, num_rows: int, out: Tensor, multiply: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Fills `out` tile by tile, as references do: `multiply` takes an expert and the numbers of its rows' inputs."""
    places = groups.order.view(-1, groups.tile_rows)
    for expert, tile in zip(groups.tile_experts.tolist(), places, strict=True):
        if expert >= 0:
            rows = tile[tile >= 0].long()
            out[rows] = multiply(expert, rows // (num_rows // num_inputs)).to(out.dtype)
    return out


def check_expert_bias(bias: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """The bias, if there is one, must be [experts, outputs], contiguous."""
    if bias is not None:
        require(bias.shape == shape, "bias", f"have shape {list(shape)}")
        require(bias.dtype == dtype and bias.is_contiguous(), "bias", f"be {dtype}, contiguous")
        require(bias.device == device, "bias", f"be on {device}")


def _check(
    inputs: Tensor,
    weight: Tensor,
    groups: ExpertGroups,
    num_rows: int,
    activation: Activation | None,
    bias: Tensor | None,
) -> int:
    """The width of the output, if all is well."""
    check_rows(inputs, "inputs")
    require(weight.ndim == 3 and weight.dtype == inputs.dtype, "weight", "be [experts, outputs, inputs] like inputs")
    require(weight.stride(2) == 1 or weight.shape[2] <= 1, "weight", "be contiguous in its last dimension")
    require(weight.shape[2] == inputs.shape[1], "weight", f"have {inputs.shape[1]} inputs")
    require(weight.device == inputs.device, "weight", f"be on {inputs.device}")
    check_row_groups(groups, num_rows, inputs)
    require(activation is None or weight.shape[1] % 2 == 0, "weight", "hold gate and up side by side")
    num_experts, outputs = weight.shape[:2]
    check_expert_bias(bias, (num_experts, outputs), inputs.dtype, inputs.device)
    return outputs if activation is None else outputs // 2
