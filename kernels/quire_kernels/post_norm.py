"""Norms after the addition to the residual stream, as encoders have them: the stream is what was normalised."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, require
from quire_kernels._shapes import ceil_div
from quire_kernels.row_norm import RowNorm, check_norm, check_sum, norm_tile, normalize, row_norm_reference


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _post_norm_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_hidden,
    p_update,
    p_weight,
    p_bias,
    num_rows,
    epsilon,
    stride_update,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    row = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    o_column = tl.arange(0, TILE_WIDTH)
    m_column = o_column < WIDTH
    m_tile = (row < num_rows)[:, None] & m_column[None, :]
    o_hidden = (row * WIDTH)[:, None] + o_column[None, :]
    # [TILE_ROWS, TILE_WIDTH]
    b_hidden = tl.load(p_hidden + o_hidden, mask=m_tile, other=0.0)
    if p_update is not None:
        o_update = (row * stride_update)[:, None] + o_column[None, :]
        b_hidden += tl.load(p_update + o_update, mask=m_tile, other=0.0).to(tl.float32)
    b_normed = normalize(b_hidden, p_weight, p_bias, epsilon, o_column, m_column, WIDTH, CENTERED)
    tl.store(p_hidden + o_hidden, b_normed, mask=m_tile)
    if p_output is not None:
        tl.store(p_output + o_hidden, b_normed.to(p_output.dtype.element_ty), mask=m_tile)


def post_norm(hidden: Tensor, update: Tensor | None, norm: RowNorm, dtype: torch.dtype) -> Tensor:
    """Replaces the residual stream by the norm of its sum with the update, and returns it in `dtype`.

    Args:
        hidden: float32 [num_tokens, width], contiguous; the norm is not rounded there.
        update: [num_tokens, width], last dimension contiguous; None: nothing is added.
        norm: its weight and bias are contiguous.
        dtype: of the result, which the next product takes.

    Returns:
        [num_tokens, width], contiguous; `hidden` itself if `dtype` is float32.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    _check(hidden, update, norm, dtype)
    output = None if dtype == torch.float32 else torch.empty_like(hidden, dtype=dtype)
    num_rows, width = hidden.shape
    if hidden.numel():
        tile = norm_tile(width)
        _post_norm_kernel[(ceil_div(num_rows, tile["TILE_ROWS"]),)](
            output,
            hidden,
            update,
            norm.weight,
            norm.bias,
            num_rows,
            norm.epsilon,
            0 if update is None else update.stride(0),
            WIDTH=width,
            CENTERED=norm.is_centered,
            **tile,
        )
    return hidden if output is None else output


def post_norm_reference(hidden: Tensor, update: Tensor | None, norm: RowNorm, dtype: torch.dtype) -> Tensor:
    """`post_norm` in plain torch."""
    _check(hidden, update, norm, dtype)
    hidden.copy_(row_norm_reference(hidden if update is None else hidden + update, norm, torch.float32))
    return hidden.to(dtype)


def _check(hidden: Tensor, update: Tensor | None, norm: RowNorm, dtype: torch.dtype) -> None:
    check_sum(hidden, update)
    require(hidden.is_contiguous(), "hidden", "be contiguous")
    require(dtype in FLOAT_DTYPES, "dtype", "be float32, float16 or bfloat16")
    check_norm(norm, "norm", hidden)
