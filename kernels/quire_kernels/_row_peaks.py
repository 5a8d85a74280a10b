"""The largest logits of rows, by chunks: a row is split over many programs, so that one row alone is fast too."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import ceil_div, check_rows, next_power_of_2
from quire_kernels.adjust_logits import SUPPRESSED, is_number

# Sums of weights in units of 2^-44 must fit 63 bits.
_MAX_VOCABULARY = (1 << 19) - 1
# How much of a row one program takes: where rows are few, less, for more of the device to take part.
_CHUNK, _CHUNK_FEW_ROWS, _FEW_ROWS = 4096, 1024, 16


class RowPeaks(NamedTuple):
    """[rows, num_chunks] each: the largest logit of a chunk of a row, and the first token that has it."""

    peaks: Tensor
    places: Tensor
    chunk: int
    """How many tokens a chunk has."""

    @property
    def num_chunks(self) -> int:
        return self.peaks.shape[1]


@triton.jit  # type: ignore[untyped-decorator]
def _peaks_kernel(  # type: ignore[no-untyped-def]
    p_peaks, p_places, p_logits, stride_logits, vocab_size, num_chunks, CHUNK: tl.constexpr
):
    """The largest logit of each chunk and the first token that has it; infinity where one is NaN or infinite."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    o_token = chunk * CHUNK + tl.arange(0, CHUNK)
    m_token = o_token < vocab_size
    # [CHUNK]
    b_logits = tl.load(p_logits + row * stride_logits + o_token, mask=m_token, other=SUPPRESSED)
    num_faults = tl.sum((~is_number(b_logits)).to(tl.int32))
    peak = tl.max(b_logits)
    place = tl.min(tl.where(b_logits == peak, o_token, vocab_size))
    tl.store(p_peaks + row * num_chunks + chunk, tl.where(num_faults > 0, float("inf"), peak))
    tl.store(p_places + row * num_chunks + chunk, place)


@triton.jit  # type: ignore[untyped-decorator]
def row_peak(p_peaks, row, num_chunks, TILE_CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest logit of a row, of those of its chunks: NaN, infinite or SUPPRESSED where no token can be sampled."""
    o_chunk = tl.arange(0, TILE_CHUNKS)
    return tl.max(tl.load(p_peaks + row * num_chunks + o_chunk, mask=o_chunk < num_chunks, other=float("-inf")))


@triton.jit  # type: ignore[untyped-decorator]
def first_peak_place(  # type: ignore[no-untyped-def]
    p_peaks, p_places, row, peak, num_chunks, vocab_size, TILE_CHUNKS: tl.constexpr
):
    """The first token of a row that has the row's largest logit, `peak`."""
    o_chunk = tl.arange(0, TILE_CHUNKS)
    m_chunk = o_chunk < num_chunks
    # [TILE_CHUNKS]
    b_peaks = tl.load(p_peaks + row * num_chunks + o_chunk, mask=m_chunk, other=float("-inf"))
    b_places = tl.load(p_places + row * num_chunks + o_chunk, mask=m_chunk, other=0)
    return tl.min(tl.where(b_peaks == peak, b_places, vocab_size))


def find_row_peaks(logits: Tensor) -> RowPeaks:
    """The peaks of at least one row of logits that `check_logits` accepts."""
    rows, vocab_size = logits.shape
    chunk: int = min(_CHUNK_FEW_ROWS if rows < _FEW_ROWS else _CHUNK, next_power_of_2(vocab_size))
    num_chunks = ceil_div(vocab_size, chunk)
    peaks = torch.empty((rows, num_chunks), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, num_chunks), dtype=torch.int32, device=logits.device)
    _peaks_kernel[(rows, num_chunks)](peaks, places, logits, logits.stride(0), vocab_size, num_chunks, CHUNK=chunk)
    return RowPeaks(peaks, places, chunk)


def check_logits(logits: Tensor) -> None:
    """Logits must be float32 [rows, vocab] and contiguous in their last dimension, of a vocabulary that is not too
    large.
    """
    check_rows(logits, "logits", [torch.float32])
    require(1 <= logits.shape[1] <= _MAX_VOCABULARY, "logits", f"have 1 to {_MAX_VOCABULARY} tokens")
