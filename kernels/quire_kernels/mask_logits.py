"""Suppresses the tokens that a bit mask does not allow."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import ceil_div, check_rows, check_vector, next_power_of_2
from quire_kernels.adjust_logits import SUPPRESSED, is_number

_CHUNK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _mask_kernel(  # type: ignore[no-untyped-def]
    p_logits, p_rows, p_bits, stride_logits, vocab_size, num_words, CHUNK: tl.constexpr
):
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(p_rows + mask)
    o_token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    m_token = o_token < vocab_size
    # [CHUNK]
    b_word = tl.load(p_bits + mask * num_words + o_token // 32, mask=m_token, other=-1)
    m_token = m_token & (((b_word >> (o_token % 32)) & 1) == 0)
    p_place = p_logits + row * stride_logits + o_token
    b_logit = tl.load(p_place, mask=m_token, other=0.0)
    # NaN and infinity stay, for `sample` to find
    tl.store(p_place, tl.full([CHUNK], SUPPRESSED, tl.float32), mask=m_token & is_number(b_logit))


def mask_logits(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Suppresses in place the tokens of some rows whose bit is not set. NaN and infinity stay as they are.

    Args:
        logits: float32 [num_rows, vocab], last dimension contiguous.
        rows: int64 [masks], rows of logits, each once.
        bits: int32 [masks, words], contiguous: bit t % 32 of word t // 32 is token t's.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device. What `rows` hold is not checked:
            that would wait for the GPU.
    """
    _check(logits, rows, bits)
    vocab_size = logits.shape[1]
    if not len(rows) or not vocab_size:
        return
    chunk = min(_CHUNK, next_power_of_2(vocab_size))
    _mask_kernel[(len(rows), ceil_div(vocab_size, chunk))](
        logits, rows, bits, logits.stride(0), vocab_size, bits.shape[1], CHUNK=chunk, num_warps=4
    )


def mask_logits_reference(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """What `mask_logits` does, in plain torch."""
    _check(logits, rows, bits)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (bits[:, tokens // 32] >> (tokens % 32)) & 1 == 1
    part = logits[rows]
    logits[rows] = torch.where(is_allowed | ~part.isfinite(), part, SUPPRESSED.value)


def _check(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    check_rows(logits, "logits", (torch.float32,))
    check_vector(rows, "rows", len(bits), torch.int64, logits.device)
    require(bits.ndim == 2 and bits.dtype == torch.int32, "bits", "be int32 [masks, words]")
    require(bits.is_contiguous() and bits.device == logits.device, "bits", "be contiguous, on the device of logits")
    require(32 * bits.shape[1] >= logits.shape[1], "bits", "have a bit for each token")
