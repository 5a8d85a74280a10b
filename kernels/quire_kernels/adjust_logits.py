"""Changes of logits before sampling: bias, penalties and suppressed tokens.

A sequence with penalties has a slot of `token_counts`, int32 [num_slots, vocab] on the device: how often each token was
generated, with the sign bit set for tokens of the prompt. `fill_token_counts` fills the slot when the sequence starts,
and `sample` counts each token. At its end nothing is to be done.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import ceil_div, check_rows, check_vector, next_power_of_2

# The logit of a suppressed token: the least float32. Minus infinity may stand in faulty logits of a model, and a faulty
# row must differ from a row of suppressed tokens.
SUPPRESSED = tl.constexpr(-3.4028234663852886e38)
# A factor near 0 would make infinities, whose differences are NaN.
_LARGEST = tl.constexpr(1e30)
_IN_PROMPT = -(2**31)
_CHUNK = 2048
_TILE_ENTRIES = 128


@dataclass(frozen=True, slots=True)
class LogitEntries:
    """Changes to single logits, in any order, each place once. A suppressed token has no entry for its bias.

    Attributes:
        rows: int32 [num_entries], or -1 where there is no entry, which lets a captured graph have room for more.
        tokens: int32 [num_entries].
        values: float32 [num_entries]; minus infinity suppresses the token, anything else is added to its logit.
    """

    rows: Tensor
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of tokens that were seen before, by row.

    Attributes:
        slots: int64 [rows], the row's place in `token_counts`, or -1 for one without penalties.
        repetition: float32 [rows], by which positive logits of tokens in prompt or output are divided, and negative
            ones multiplied; 1 for none.
        frequency: float32 [rows], subtracted for each time that a token was generated; 0 for none.
        presence: float32 [rows], subtracted if it was generated at all; 0 for none.
        token_counts: int32 [num_slots, vocab], contiguous.
    """

    slots: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    token_counts: Tensor


def fill_token_counts(token_counts: Tensor, slot: int, prompt: Tensor, generated: Tensor) -> None:
    """Fills a slot for a new sequence: int64 token ids of its prompt, and of its output so far."""
    seen = token_counts[slot]
    seen.zero_()
    seen.index_fill_(0, prompt, _IN_PROMPT)
    seen.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))


@triton.jit
def is_number(b_values):  # type: ignore[no-untyped-def]
    """Which values are neither infinite nor NaN."""
    return tl.abs(b_values) <= -SUPPRESSED


@triton.jit  # type: ignore[untyped-decorator]
def _entries_kernel(  # type: ignore[no-untyped-def]
    p_logits, p_rows, p_tokens, p_values, num_entries, stride_logits, TILE: tl.constexpr
):
    o_entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_entry = o_entry < num_entries
    # [TILE]
    b_row = tl.load(p_rows + o_entry, mask=m_entry, other=-1).to(tl.int64)
    b_token = tl.load(p_tokens + o_entry, mask=m_entry, other=0)
    b_value = tl.load(p_values + o_entry, mask=m_entry, other=0.0)
    m_entry = b_row >= 0
    p_place = p_logits + b_row * stride_logits + b_token
    b_logit = tl.load(p_place, mask=m_entry, other=0.0)
    m_suppressed = b_value == float("-inf")
    b_changed = tl.where(m_suppressed, SUPPRESSED, b_logit + tl.where(m_suppressed, 0.0, b_value))
    # NaN and infinity stay, for `sample` to find
    tl.store(p_place, b_changed, mask=m_entry & is_number(b_logit))


@triton.jit  # type: ignore[untyped-decorator]
def _penalties_kernel(  # type: ignore[no-untyped-def]
    p_logits,
    p_slots,
    p_repetition,
    p_frequency,
    p_presence,
    p_token_counts,
    stride_logits,
    vocab_size,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + row)
    repetition = tl.load(p_repetition + row)
    frequency = tl.load(p_frequency + row)
    presence = tl.load(p_presence + row)
    if (slot < 0) | ((repetition == 1.0) & (frequency == 0.0) & (presence == 0.0)):
        return
    o_token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    m_token = o_token < vocab_size
    # [CHUNK]
    b_seen = tl.load(p_token_counts + slot * vocab_size + o_token, mask=m_token, other=0)
    m_seen = b_seen != 0
    p_place = p_logits + row * stride_logits + o_token
    b_logit = tl.load(p_place, mask=m_seen, other=0.0)
    m_seen = m_seen & is_number(b_logit) & (b_logit != SUPPRESSED)
    b_logit = tl.where(m_seen, b_logit, 0.0)
    if repetition != 1.0:
        b_logit = tl.where(b_logit > 0.0, tl.div_rn(b_logit, repetition), b_logit * repetition)
        b_logit = tl.minimum(tl.maximum(b_logit, -_LARGEST), _LARGEST)
    b_count = b_seen & 0x7FFFFFFF
    b_logit -= frequency * b_count.to(tl.float32) + tl.where(b_count > 0, presence, 0.0)
    tl.store(p_place, b_logit, mask=m_seen)


def adjust_logits(logits: Tensor, entries: LogitEntries | None, penalties: Penalties | None) -> None:
    """Changes logits in place: bias, then the repetition penalty, then frequency and presence; suppression last.

    NaN and infinity stay as they are.

    Args:
        logits: float32 [rows, vocab], last dimension contiguous.
        entries: bias and suppressed tokens of all rows.
        penalties: of each row.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device. What index tensors hold is not
            checked: that would wait for the GPU.
    """
    _check(logits, entries, penalties)
    rows, vocab_size = logits.shape
    if not logits.numel():
        return
    if entries is not None and len(entries.rows):
        _entries_kernel[(ceil_div(len(entries.rows), _TILE_ENTRIES),)](
            logits,
            entries.rows,
            entries.tokens,
            entries.values,
            len(entries.rows),
            logits.stride(0),
            TILE=_TILE_ENTRIES,
            num_warps=4,
        )
    if penalties is not None:
        chunk = min(_CHUNK, next_power_of_2(vocab_size))
        _penalties_kernel[(rows, ceil_div(vocab_size, chunk))](
            logits,
            penalties.slots,
            penalties.repetition,
            penalties.frequency,
            penalties.presence,
            penalties.token_counts,
            logits.stride(0),
            vocab_size,
            CHUNK=chunk,
            num_warps=4,
        )


def adjust_logits_reference(logits: Tensor, entries: LogitEntries | None, penalties: Penalties | None) -> None:
    """What `adjust_logits` does, row by row in plain torch."""
    _check(logits, entries, penalties)
    if entries is not None:
        named = zip(entries.rows.tolist(), entries.tokens.tolist(), entries.values.tolist(), strict=True)
        for row, token, value in named:
            if row >= 0 and logits[row, token].isfinite():
                logits[row, token] = SUPPRESSED.value if value == float("-inf") else logits[row, token] + value
    if penalties is None:
        return
    for row, slot in enumerate(penalties.slots.tolist()):
        if slot < 0:
            continue
        seen, values = penalties.token_counts[slot], logits[row]
        open_to_change = (seen != 0) & values.isfinite() & (values != SUPPRESSED.value)
        factor = penalties.repetition[row]
        changed = torch.where(values > 0, values / factor, values * factor).clamp(-_LARGEST.value, _LARGEST.value)
        changed = torch.where(factor == 1.0, values, changed)
        counts = seen & 0x7FFFFFFF
        changed = changed - (penalties.frequency[row] * counts + penalties.presence[row] * (counts > 0))
        logits[row] = torch.where(open_to_change, changed, values)


def _check(logits: Tensor, entries: LogitEntries | None, penalties: Penalties | None) -> None:
    check_rows(logits, "logits", [torch.float32])
    rows, vocab_size = logits.shape
    if entries is not None:
        length = len(entries.rows)
        check_vector(entries.rows, "entries.rows", length, torch.int32, logits.device)
        check_vector(entries.tokens, "entries.tokens", length, torch.int32, logits.device)
        check_vector(entries.values, "entries.values", length, torch.float32, logits.device)
    if penalties is not None:
        check_vector(penalties.slots, "penalties.slots", rows, torch.int64, logits.device)
        check_vector(penalties.repetition, "penalties.repetition", rows, torch.float32, logits.device)
        check_vector(penalties.frequency, "penalties.frequency", rows, torch.float32, logits.device)
        check_vector(penalties.presence, "penalties.presence", rows, torch.float32, logits.device)
        counts = penalties.token_counts
        check_rows(counts, "penalties.token_counts", [torch.int32])
        require(counts.shape[1] == vocab_size, "penalties.token_counts", "have the vocabulary of logits")
        require(counts.is_contiguous(), "penalties.token_counts", "be contiguous")
        require(counts.device == logits.device, "penalties.token_counts", "be on the device of logits")
