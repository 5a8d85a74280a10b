"""Root mean square normalisation (arXiv:1910.07467), with the addition to the residual stream before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, require
from quire_kernels._shapes import check_rows, check_vector

# Elements that a program holds; narrower rows share one.
_TILE = 1024
_MAX_WIDTH = 1 << 16


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_inputs,
    p_update,
    p_weight,
    num_rows,
    epsilon,
    stride_inputs_token,
    stride_inputs_head,
    stride_update_token,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    # A row is one head of one token; its number counts rows of the output, which is contiguous.
    row = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    o_column = tl.arange(0, TILE_WIDTH)
    m_column = o_column < WIDTH
    m_tile = (row < num_rows)[:, None] & m_column[None, :]
    o_inputs = (row // HEADS * stride_inputs_token + row % HEADS * stride_inputs_head)[:, None] + o_column[None, :]
    # [TILE_ROWS, TILE_WIDTH]
    b_inputs = tl.load(p_inputs + o_inputs, mask=m_tile, other=0.0).to(tl.float32)
    if p_update is not None:
        o_update = (row * stride_update_token)[:, None] + o_column[None, :]
        b_inputs += tl.load(p_update + o_update, mask=m_tile, other=0.0).to(tl.float32)
        tl.store(p_inputs + o_inputs, b_inputs, mask=m_tile)
    b_scale = tl.rsqrt(tl.sum(b_inputs * b_inputs, axis=1) / WIDTH + epsilon)
    b_weight = tl.load(p_weight + o_column, mask=m_column, other=0.0).to(tl.float32)
    b_output = (b_inputs * b_scale[:, None] * b_weight[None, :]).to(p_output.dtype.element_ty)
    tl.store(p_output + (row * WIDTH)[:, None] + o_column[None, :], b_output, mask=m_tile)


def rms_norm(inputs: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None) -> Tensor:
    """Each row over its root mean square, times the weight; computed in float32.

    Args:
        inputs: [num_rows, width] or, for a norm per head, [num_tokens, num_heads, width], last dimension contiguous.
        weight: [width], contiguous.
        epsilon: added to the mean square.
        dtype: of the result; None: the weight's.

    Returns:
        A contiguous tensor of the shape of `inputs`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    require(inputs.ndim in (2, 3), "inputs", "be [num_rows, width] or [num_tokens, num_heads, width]")
    require(inputs.dtype in FLOAT_DTYPES, "inputs", "be float32, float16 or bfloat16")
    require(inputs.stride(-1) == 1 or inputs.shape[-1] <= 1, "inputs", "be contiguous in its last dimension")
    return _launch(inputs, None, weight, epsilon, dtype)


def add_rms_norm(
    hidden: Tensor, update: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Adds the update to the residual stream in place, and returns `rms_norm` of the sum.

    Args:
        hidden: float32 [num_tokens, width], last dimension contiguous; the sum is not rounded.
        update: [num_tokens, width], last dimension contiguous; None: nothing is added.
        weight: [width], contiguous.
        epsilon: added to the mean square.
        dtype: of the result; None: the weight's.

    Returns:
        [num_tokens, width], contiguous.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    check_rows(hidden, "hidden", [torch.float32])
    if update is not None:
        check_rows(update, "update")
        require(update.shape == hidden.shape, "update", "have the shape of hidden")
        require(update.device == hidden.device, "update", "be on the device of hidden")
    return _launch(hidden, update, weight, epsilon, dtype)


def _launch(inputs: Tensor, update: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None) -> Tensor:
    width = inputs.shape[-1]
    require(weight.dtype in FLOAT_DTYPES, "weight", "be float32, float16 or bfloat16")
    check_vector(weight, "weight", width, weight.dtype, inputs.device)
    require(dtype is None or dtype in FLOAT_DTYPES, "dtype", "be float32, float16 or bfloat16")
    require(width <= _MAX_WIDTH, "weight", f"be at most {_MAX_WIDTH} wide")
    output = torch.empty(inputs.shape, dtype=dtype or weight.dtype, device=inputs.device)
    if output.numel() == 0:
        return output
    num_rows = output.numel() // width
    tile_width = triton.next_power_of_2(width)
    tile_rows = max(1, _TILE // tile_width)
    _rms_norm_kernel[(triton.cdiv(num_rows, tile_rows),)](
        output,
        inputs,
        update,
        weight,
        num_rows,
        epsilon,
        inputs.stride(0),
        inputs.stride(1) if inputs.ndim == 3 else 0,
        0 if update is None else update.stride(0),
        HEADS=inputs.shape[1] if inputs.ndim == 3 else 1,
        WIDTH=width,
        TILE_ROWS=tile_rows,
        TILE_WIDTH=tile_width,
        # Up to 16 elements a thread, as far as a block's threads go
        num_warps=min(16, max(4, tile_width // 512)),
    )
    return output


def rms_norm_reference(inputs: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None) -> Tensor:
    """`rms_norm` in plain torch."""
    scale = (inputs.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (inputs.float() * scale * weight.float()).to(dtype or weight.dtype)


def add_rms_norm_reference(
    hidden: Tensor, update: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> Tensor:
    """`add_rms_norm` in plain torch."""
    if update is not None:
        hidden += update
    return rms_norm_reference(hidden, weight, epsilon, dtype)
