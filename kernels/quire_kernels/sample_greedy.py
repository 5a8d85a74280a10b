"""The token of the largest logit of each row, by two kernels: for steps in which no row is sampled by chance.

`sample` takes the same token at temperature 0, but launches the search of top-k and top-p for all rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._row_peaks import check_logits, find_row_peaks, first_peak_place, row_peak
from quire_kernels._shapes import check_vector, next_power_of_2
from quire_kernels.adjust_logits import SUPPRESSED, is_number


@triton.jit  # type: ignore[untyped-decorator]
def _pick_kernel(  # type: ignore[no-untyped-def]
    p_tokens, p_peaks, p_places, vocab_size, num_chunks, TILE_CHUNKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    peak = row_peak(p_peaks, row, num_chunks, TILE_CHUNKS)
    token = tl.full([], -1, tl.int32)
    if (peak > SUPPRESSED) & is_number(peak):
        token = first_peak_place(p_peaks, p_places, row, peak, num_chunks, vocab_size, TILE_CHUNKS)
    tl.store(p_tokens + row, token.to(tl.int64))


def sample_greedy(logits: Tensor, out: Tensor) -> None:
    """Writes the argmax of each row to `out`, the first of equals; -1 for a row with NaN or infinity, or with all
    tokens suppressed.

    Args:
        logits: float32 [rows, vocab], last dimension contiguous; they are not changed.
        out: int64 [rows].

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    _check(logits, out)
    rows, vocab_size = logits.shape
    if not rows:
        return
    found = find_row_peaks(logits)
    _pick_kernel[(rows,)](
        out,
        found.peaks,
        found.places,
        vocab_size,
        found.num_chunks,
        TILE_CHUNKS=next_power_of_2(found.num_chunks),
    )


def sample_greedy_reference(logits: Tensor, out: Tensor) -> None:
    """What `sample_greedy` does, in plain torch."""
    _check(logits, out)
    is_valid = logits.isfinite().all(-1) & (logits > SUPPRESSED.value).any(-1)
    out.copy_(torch.where(is_valid, (logits == logits.max(-1, keepdim=True).values).int().argmax(-1), -1))


def _check(logits: Tensor, out: Tensor) -> None:
    check_logits(logits)
    check_vector(out, "out", len(logits), torch.int64, logits.device)
