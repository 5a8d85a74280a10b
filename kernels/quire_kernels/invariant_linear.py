"""A matrix product with the same bits for a row, whatever the number of rows.

Libraries choose tiles and the number of partial sums by the number of rows. Here an output is one sum over the inputs
in tiles of their order, by the same instructions for any number of rows: tiles depend on the weight alone.
"""

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, require
from quire_kernels._device import device_limits, pipeline_stages
from quire_kernels._shapes import ceil_div, check_rows, check_vector

# Rows of a tile: the fewest of Hopper's matrix instruction. Fewer of float32, whose products run without tensor cores.
_TILE_ROWS, _TILE_ROWS_EXACT = 64, 32
_TILE_INPUTS, _TILE_INPUTS_EXACT = 64, 32
_TILES_OUTPUTS = (128, 64, 32)


@triton.jit
def store_products(  # type: ignore[no-untyped-def]
    b_sum, p_output, p_bias, o_row, m_row, o_output, m_output, stride_output
):
    """Stores a tile of float32 sums [rows, outputs] with their bias, if there is one, in the dtype of the output."""
    if p_bias is not None:
        b_sum += tl.load(p_bias + o_output, mask=m_output, other=0.0).to(tl.float32)[None, :]
    o_out = o_row[:, None] * stride_output + o_output[None, :]
    tl.store(p_output + o_out, b_sum.to(p_output.dtype.element_ty), mask=m_row[:, None] & m_output[None, :])


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _invariant_linear_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_inputs,
    p_weight,
    p_bias,
    num_rows,
    stride_output,
    stride_inputs,
    stride_weight,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    # Tiles of rows are neighbours in a launch, so that each tile of the weight comes from memory once
    o_row = (tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    o_output = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    m_row = o_row < num_rows
    m_output = o_output < OUTPUTS
    p_row = p_inputs + o_row[:, None] * stride_inputs
    p_column = p_weight + o_output.to(tl.int64)[:, None] * stride_weight
    b_sum = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, INPUTS, TILE_K):
        o_input = start + tl.arange(0, TILE_K)
        m_input = o_input < INPUTS
        # [TILE_M, TILE_K]
        b_inputs = tl.load(p_row + o_input[None, :], mask=m_row[:, None] & m_input[None, :], other=0.0)
        # [TILE_N, TILE_K]
        b_weight = tl.load(p_column + o_input[None, :], mask=m_output[:, None] & m_input[None, :], other=0.0)
        b_sum = tl.dot(b_inputs, tl.trans(b_weight), b_sum, input_precision="ieee")
    store_products(b_sum, p_output, p_bias, o_row, m_row, o_output, m_output, stride_output)


def invariant_linear(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """`inputs` times the weight's transpose, and the bias added; sums are float32 and rounded once.

    Args:
        inputs: [rows, in_features], last dimension contiguous.
        weight: [out_features, in_features] of the dtype of `inputs`, last dimension contiguous.
        bias: [out_features] of the same dtype, contiguous; None for none.
        out: the output to write: [rows, out_features], float32 or of the dtype of `inputs`, last dimension contiguous.

    Returns:
        `out`, or else [rows, out_features], contiguous, of the dtype of `inputs`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    _check(inputs, weight, bias, out)
    (rows, in_features), out_features = inputs.shape, len(weight)
    if out is None:
        out = torch.empty((rows, out_features), dtype=inputs.dtype, device=inputs.device)
    if out.numel() == 0:
        return out
    exact = inputs.dtype == torch.float32
    tile_m, tile_k = (_TILE_ROWS_EXACT, _TILE_INPUTS_EXACT) if exact else (_TILE_ROWS, _TILE_INPUTS)
    tile_n = choose_tile_outputs(out_features, device_limits(inputs.device).multiprocessors)
    _invariant_linear_kernel[(ceil_div(rows, tile_m), ceil_div(out_features, tile_n))](
        out,
        inputs,
        weight,
        bias,
        rows,
        out.stride(0),
        inputs.stride(0),
        weight.stride(0),
        OUTPUTS=out_features,
        INPUTS=in_features,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        num_warps=4,
        num_stages=pipeline_stages((tile_m + tile_n) * tile_k * inputs.dtype.itemsize, inputs.device),
    )
    return out


def invariant_linear_reference(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """`invariant_linear` in plain torch."""
    _check(inputs, weight, bias, out)
    product = F.linear(inputs.float(), weight.float(), None if bias is None else bias.float())
    return product.to(inputs.dtype) if out is None else out.copy_(product)


def choose_tile_outputs(out_features: int, multiprocessors: int) -> int:
    """The largest tile of outputs that gives each multiprocessor work with few rows, or else the smallest."""
    return next(
        (tile for tile in _TILES_OUTPUTS if ceil_div(out_features, tile) >= multiprocessors), _TILES_OUTPUTS[-1]
    )


def _check(inputs: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> None:
    check_rows(inputs, "inputs")
    check_rows(weight, "weight", [inputs.dtype])
    require(weight.device == inputs.device, "weight", f"be on {inputs.device}")
    require(weight.shape[1] == inputs.shape[1], "weight", f"be [out_features, {inputs.shape[1]}]")
    if bias is not None:
        check_vector(bias, "bias", len(weight), inputs.dtype, inputs.device)
    if out is not None:
        check_rows(out, "out", [dtype for dtype in FLOAT_DTYPES if dtype in (inputs.dtype, torch.float32)])
        require(out.device == inputs.device, "out", f"be on {inputs.device}")
        require(out.shape == (len(inputs), len(weight)), "out", f"have shape {[len(inputs), len(weight)]}")
