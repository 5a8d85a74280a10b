"""What follows the product of the head: the bias of the logits, their factor, and their soft cap."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, require
from quire_kernels._shapes import ceil_div, check_rows, check_vector, next_power_of_2

_TILE = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _logits_epilogue_kernel(  # type: ignore[no-untyped-def]
    p_logits, p_bias, scale, soft_cap, stride_logits, vocab_size, TILE: tl.constexpr
):
    p_row = p_logits + tl.program_id(0).to(tl.int64) * stride_logits
    o_token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_token = o_token < vocab_size
    # [TILE]
    b_logits = tl.load(p_row + o_token, mask=m_token, other=0.0)
    if p_bias is not None:
        b_logits += tl.load(p_bias + o_token, mask=m_token, other=0.0).to(tl.float32)
    if scale is not None:
        b_logits *= scale
    if soft_cap is not None:
        # tanh(y) of a positive y is (1 - exp(-2 y)) / (1 + exp(-2 y)): no intermediate infinity for any input.
        b_decay = tl.exp(-2.0 / soft_cap * tl.abs(b_logits))
        b_capped = soft_cap * (1.0 - b_decay) / (1.0 + b_decay)
        b_logits = tl.where(b_logits < 0.0, -b_capped, b_capped)
    tl.store(p_row + o_token, b_logits, mask=m_token)


def logits_epilogue(
    logits: Tensor, bias: Tensor | None = None, soft_cap: float | None = None, *, scale: float | None = None
) -> None:
    """Adds the bias to the logits, multiplies them by the scale, then caps them: logits x become
    soft_cap * tanh(x / soft_cap). In place.

    Args:
        logits: float32 [rows, vocab_size], last dimension contiguous.
        bias: [vocab_size], contiguous; None: nothing is added.
        soft_cap: positive; None: they stay.
        scale: None: 1.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride, device or range.
    """
    _check(logits, bias, soft_cap)
    rows, vocab_size = logits.shape
    if logits.numel() == 0 or (bias is None and soft_cap is None and scale is None):
        return
    tile = min(_TILE, next_power_of_2(vocab_size))
    _logits_epilogue_kernel[(rows, ceil_div(vocab_size, tile))](
        logits, bias, scale, soft_cap, logits.stride(0), vocab_size, TILE=tile, num_warps=4
    )


def logits_epilogue_reference(
    logits: Tensor, bias: Tensor | None = None, soft_cap: float | None = None, *, scale: float | None = None
) -> None:
    """`logits_epilogue` in plain torch."""
    _check(logits, bias, soft_cap)
    if bias is not None:
        logits += bias
    if scale is not None:
        logits *= scale
    if soft_cap is not None:
        logits.div_(soft_cap).tanh_().mul_(soft_cap)


def _check(logits: Tensor, bias: Tensor | None, soft_cap: float | None) -> None:
    check_rows(logits, "logits", [torch.float32])
    if bias is not None:
        require(bias.dtype in FLOAT_DTYPES, "bias", "be float32, float16 or bfloat16")
        check_vector(bias, "bias", logits.shape[1], bias.dtype, logits.device)
    require(soft_cap is None or soft_cap > 0, "soft_cap", "be positive")
