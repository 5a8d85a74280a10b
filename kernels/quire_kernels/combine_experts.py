"""The sum of what a token's experts return, each times its weight, in the order in which they were chosen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import ceil_div, check_rows, next_power_of_2

_TILE = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _combine_experts_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_rows,
    p_weights,
    p_shared,
    p_shared_gate,
    stride_rows,
    stride_shared,
    stride_shared_gate,
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_column = o_column < WIDTH
    # [TILE]
    b_sum = tl.zeros([TILE], tl.float32)
    for place in range(NUM_CHOSEN):
        row = token * NUM_CHOSEN + place
        b_row = tl.load(p_rows + row * stride_rows + o_column, mask=m_column, other=0.0).to(tl.float32)
        b_sum += b_row * tl.load(p_weights + row)
    if p_shared is not None:
        b_shared = tl.load(p_shared + token * stride_shared + o_column, mask=m_column, other=0.0).to(tl.float32)
        if p_shared_gate is not None:
            b_shared *= tl.sigmoid(tl.load(p_shared_gate + token * stride_shared_gate))
        b_sum += b_shared
    tl.store(p_output + token * WIDTH + o_column, b_sum.to(p_output.dtype.element_ty), mask=m_column)


def combine_experts(
    rows: Tensor, weights: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None
) -> Tensor:
    """The weighted sum of each token's rows, computed in float32 and rounded once.

    Args:
        rows: [num_tokens * num_chosen, width], those of one token together, last dimension contiguous.
        weights: float32 [num_tokens, num_chosen], contiguous.
        shared: [num_tokens, width] of the dtype of `rows`, which is added; last dimension contiguous.
        shared_gate: float32 [num_tokens]; `shared` is multiplied by its sigmoid.

    Returns:
        [num_tokens, width], contiguous, of the dtype of `rows`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    _check(rows, weights, shared, shared_gate)
    (num_tokens, num_chosen), width = weights.shape, rows.shape[1]
    output = torch.empty((num_tokens, width), dtype=rows.dtype, device=rows.device)
    if output.numel() == 0:
        return output
    tile = min(_TILE, next_power_of_2(width))
    _combine_experts_kernel[(num_tokens, ceil_div(width, tile))](
        output,
        rows,
        weights,
        shared,
        shared_gate,
        rows.stride(0),
        0 if shared is None else shared.stride(0),
        0 if shared_gate is None else shared_gate.stride(0),
        WIDTH=width,
        NUM_CHOSEN=num_chosen,
        TILE=tile,
        num_warps=4,
    )
    return output


def combine_experts_reference(
    rows: Tensor, weights: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None
) -> Tensor:
    """`combine_experts` in plain torch."""
    _check(rows, weights, shared, shared_gate)
    total = (rows.float().view(*weights.shape, -1) * weights[:, :, None]).sum(1)
    if shared is not None:
        total += shared.float() * (1.0 if shared_gate is None else shared_gate.sigmoid()[:, None])
    return total.to(rows.dtype)


def _check(rows: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None) -> None:
    check_rows(rows, "rows")
    check_rows(weights, "weights", [torch.float32])
    require(weights.is_contiguous(), "weights", "be contiguous")
    require(weights.numel() == len(rows), "weights", f"be of {len(rows)} rows")
    require(weights.device == rows.device, "weights", f"be on {rows.device}")
    if shared is not None:
        check_rows(shared, "shared", [rows.dtype])
        require(shared.shape == (len(weights), rows.shape[1]), "shared", f"be {[len(weights), rows.shape[1]]}")
    if shared_gate is not None:
        require(shared is not None, "shared_gate", "come with shared")
        require(shared_gate.shape == (len(weights),), "shared_gate", f"be of {len(weights)} tokens")
        require(shared_gate.dtype == torch.float32, "shared_gate", "be float32")
