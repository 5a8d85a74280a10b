"""The logarithm of the sum of a row's exponentials, which turns logits into log-probabilities.

One program sums a row, in tiles of their order. Torch's own reduction depends on the number of rows, and so do the bits
of its sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import check_rows, next_power_of_2

_TILE = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _log_norms_kernel(p_norms, p_logits, stride_logits, vocab_size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * stride_logits
    b_peak = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, vocab_size, TILE):
        o_token = start + tl.arange(0, TILE)
        # [TILE]
        b_peak = tl.maximum(b_peak, tl.load(p_row + o_token, mask=o_token < vocab_size, other=float("-inf")))
    peak = tl.max(b_peak)
    b_sum = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        o_token = start + tl.arange(0, TILE)
        # [TILE]
        b_sum += tl.exp(tl.load(p_row + o_token, mask=o_token < vocab_size, other=float("-inf")) - peak)
    tl.store(p_norms + row, peak + tl.log(tl.sum(b_sum)))


def log_norms(logits: Tensor) -> Tensor:
    """The logarithm of the sum of each row's exponentials. A row's bits do not depend on the other rows.

    Args:
        logits: float32 [rows, vocab], finite, last dimension contiguous.

    Returns:
        float32 [rows]; NaN for a row with NaN.

    Raises:
        ValueError: `logits` have a wrong shape, dtype or stride.
    """
    _check(logits)
    rows, vocab_size = logits.shape
    norms = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        tile = min(_TILE, next_power_of_2(vocab_size))
        _log_norms_kernel[(rows,)](norms, logits, logits.stride(0), vocab_size, TILE=tile, num_warps=8)
    return norms


def log_norms_reference(logits: Tensor) -> Tensor:
    """`log_norms` in plain torch."""
    _check(logits)
    return logits.logsumexp(-1)


def _check(logits: Tensor) -> None:
    check_rows(logits, "logits", [torch.float32])
    require(logits.shape[1] >= 1, "logits", "have a token at least")
