"""Samples one token for each row of logits, without sorting the vocabulary and without waiting for the device.

A sample is a function of the row's logits, its parameters, seed, index and position. Of the tokens that min-p and top-k
keep, each on its own, and of those that top-p keeps of these, one is found by inverse CDF in vocabulary order, for one
uniform number (Philox). A row is split over many programs, so that one row alone is fast too.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._row_peaks import check_logits, find_row_peaks, first_peak_place, row_peak
from quire_kernels._sample_threshold import (
    MIN_TEMPERATURE,
    PASSES,
    RECORD,
    is_random,
    measure_kernel,
    probability_mass,
    sampling_threshold,
    softmax_weight_bits,
)
from quire_kernels._shapes import check_vector, next_power_of_2
from quire_kernels.adjust_logits import SUPPRESSED, Penalties, is_number

_TILE = 1024
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters, tensors [rows] on the device, so that a captured graph can be replayed with other values.

    Attributes:
        temperature: float32; below 1e-5 the argmax is taken, the first of equals, whatever else is set.
        top_k: int32; 0 or less, or the vocabulary's size or more: all.
        top_p: float64 in (0, 1].
        min_p: float32 in [0, 1].
        seeds: int64, the bits of an unsigned seed.
        indices, positions: int32, the sequence's index in its request, and that of the sampled token in its sequence.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    indices: Tensor
    positions: Tensor


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _chunk_masses_kernel(  # type: ignore[no-untyped-def]
    p_chunk_masses,
    p_records,
    p_logits,
    p_peaks,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    stride_logits,
    vocab_size,
    num_rows,
    num_chunks,
    PASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    """The probability mass of each chunk's kept tokens."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(p_temperature + row)
    peak = row_peak(p_peaks, row, num_chunks, TILE_CHUNKS)
    if not is_random(peak, temperature):
        return
    top_k = tl.load(p_top_k + row)
    top_p = tl.load(p_top_p + row)
    threshold = sampling_threshold(p_records, row, num_rows, top_k, top_p, tl.load(p_min_p + row), vocab_size, PASSES)
    p_chunk_mass = p_chunk_masses + row * num_chunks + chunk
    if softmax_weight_bits(tl.load(p_peaks + row * num_chunks + chunk), peak, temperature) < threshold:
        tl.store(p_chunk_mass, 0)
        return
    o_token = chunk * CHUNK + tl.arange(0, CHUNK)
    # [CHUNK]
    b_logits = tl.load(p_logits + row * stride_logits + o_token, mask=o_token < vocab_size, other=float("-inf"))
    b_bits = softmax_weight_bits(b_logits, peak, temperature)
    tl.store(p_chunk_mass, tl.sum(tl.where(b_bits >= threshold, probability_mass(b_bits), 0)))


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _sample_kernel(  # type: ignore[no-untyped-def]
    p_tokens,
    p_token_counts,
    p_slots,
    p_chunk_masses,
    p_places,
    p_records,
    p_logits,
    p_peaks,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_seeds,
    p_indices,
    p_positions,
    stride_logits,
    vocab_size,
    num_rows,
    num_chunks,
    PASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    """The token of each row: first its chunk, then its place in the chunk."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(p_temperature + row)
    peak = row_peak(p_peaks, row, num_chunks, TILE_CHUNKS)
    o_chunk = tl.arange(0, TILE_CHUNKS)
    m_chunk = o_chunk < num_chunks
    token = tl.full([], -1, tl.int32)
    if (peak > SUPPRESSED) & is_number(peak):
        if not is_random(peak, temperature):
            token = first_peak_place(p_peaks, p_places, row, peak, num_chunks, vocab_size, TILE_CHUNKS)
        else:
            # [TILE_CHUNKS]
            b_chunk_masses = tl.load(p_chunk_masses + row * num_chunks + o_chunk, mask=m_chunk, other=0)
            b_ends = tl.cumsum(b_chunk_masses, axis=0)
            total = tl.sum(b_chunk_masses)
            # 53 random bits, as a fraction of 2^53; times the total, in integers
            position = tl.load(p_positions + row)
            index = tl.load(p_indices + row)
            high, low, _, _ = tl.philox(tl.load(p_seeds + row), position, index, position * 0, position * 0)
            fraction = ((high >> 5).to(tl.uint64) << 26) | (low >> 6).to(tl.uint64)
            target = tl.umulhi(fraction << 11, total.to(tl.uint64)).to(tl.int64)
            chunk = tl.sum((b_ends <= target).to(tl.int32))
            target -= tl.sum(tl.where(o_chunk < chunk, b_chunk_masses, 0))

            top_k = tl.load(p_top_k + row)
            top_p = tl.load(p_top_p + row)
            threshold = sampling_threshold(
                p_records, row, num_rows, top_k, top_p, tl.load(p_min_p + row), vocab_size, PASSES
            )
            o_token = chunk * CHUNK + tl.arange(0, CHUNK)
            # [CHUNK]
            b_logits = tl.load(p_logits + row * stride_logits + o_token, mask=o_token < vocab_size, other=float("-inf"))
            b_bits = softmax_weight_bits(b_logits, peak, temperature)
            b_reached = tl.cumsum(tl.where(b_bits >= threshold, probability_mass(b_bits), 0), axis=0)
            token = chunk * CHUNK + tl.sum((b_reached <= target).to(tl.int32))
    tl.store(p_tokens + row, token.to(tl.int64))
    if p_token_counts is not None:
        slot = tl.load(p_slots + row)
        if (slot >= 0) & (token >= 0):
            p_count = p_token_counts + slot * vocab_size + token
            tl.store(p_count, tl.load(p_count) + 1)


def sample(logits: Tensor, sampling: SamplingTensors, penalties: Penalties | None = None) -> Tensor:
    """Samples a token for each row. Nothing here waits for the device, so that it can be part of a captured graph.

    Ties at a limit are all kept. The uniform number has 53 bits: Philox4x32-10 under the seed, for the counter
    (position, index, 0, 0). The token does not depend on the other rows.

    Args:
        logits: float32 [rows, vocab], last dimension contiguous, after `adjust_logits`; they are not changed.
        sampling: parameters of each row.
        penalties: the slots in which the sampled tokens are counted, for the next call of `adjust_logits`; no two
            rows may share one. None: nowhere.

    Returns:
        int64 [rows], the tokens; -1 for a row with NaN or infinity, or with all tokens suppressed.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device. Values are not checked.
    """
    _check(logits, sampling, penalties)
    rows, vocab_size = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return tokens
    peaks, places, chunk = found = find_row_peaks(logits)
    num_chunks = found.num_chunks
    chunk_masses = torch.empty((rows, num_chunks), dtype=torch.int64, device=device)
    records = torch.zeros((2, PASSES, rows, RECORD.value), dtype=torch.int64, device=device)
    limits = (logits, peaks, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    sizes = (logits.stride(0), vocab_size, rows, num_chunks)
    tiles = {"PASSES": PASSES, "CHUNK": chunk, "TILE_CHUNKS": next_power_of_2(num_chunks)}
    grid = (rows, num_chunks)

    for by_mass in (False, True):
        for pass_index in range(PASSES):
            measure_kernel[grid](
                records,
                *limits,
                *sizes,
                pass_index,
                BY_MASS=by_mass,
                IS_FIRST=pass_index == 0,
                IS_SECOND=pass_index == 1,
                TILE=min(_TILE, chunk),
                **tiles,
            )
    _chunk_masses_kernel[grid](chunk_masses, records, *limits, *sizes, **tiles)
    _sample_kernel[(rows,)](
        tokens,
        None if penalties is None else penalties.token_counts,
        None if penalties is None else penalties.slots,
        chunk_masses,
        places,
        records,
        *limits,
        sampling.seeds,
        sampling.indices,
        sampling.positions,
        *sizes,
        **tiles,
    )
    return tokens


def sample_reference(logits: Tensor, sampling: SamplingTensors, penalties: Penalties | None = None) -> Tensor:
    """`sample` row by row in plain torch, in float64."""
    _check(logits, sampling, penalties)
    tokens = torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)
    for row, values in enumerate(logits):
        if bool(values.isfinite().all()) and bool((values > SUPPRESSED.value).any()):
            tokens[row] = _sample_row(values.double(), sampling, row)
    if penalties is not None:
        for slot, token in zip(penalties.slots.tolist(), tokens.tolist(), strict=True):
            if slot >= 0 and token >= 0:
                penalties.token_counts[slot, token] += 1
    return tokens


def _sample_row(logits: Tensor, sampling: SamplingTensors, row: int) -> Tensor:
    """One token for finite float64 logits [vocab]."""
    temperature, top_k, top_p = float(sampling.temperature[row]), int(sampling.top_k[row]), float(sampling.top_p[row])
    if temperature < MIN_TEMPERATURE.value:
        return (logits == logits.max()).nonzero().min()
    weights = ((logits - logits.max()) / temperature).exp()
    kept = weights >= sampling.min_p[row]
    if 0 < top_k < len(weights):
        kept &= weights >= weights.sort(descending=True).values[top_k - 1]
    weights = weights * kept
    if top_p < 1.0:
        ranked = weights.sort(descending=True).values
        short = int((ranked.cumsum(0) < top_p * ranked.sum()).sum())
        weights = weights * (weights >= ranked[min(short, len(ranked) - 1)])
    ends = weights.cumsum(0)
    number = uniform(int(sampling.seeds[row]), int(sampling.indices[row]), int(sampling.positions[row]))
    return torch.minimum((ends <= number * ends[-1]).sum(), weights.nonzero().max())


def uniform(seed: int, index: int, position: int) -> float:
    """The uniform number in [0, 1) of a sample: 53 bits of Philox4x32-10 (Salmon et al., SC 2011)."""
    words, key = [position, index, 0, 0], [seed & _MASK, seed >> 32 & _MASK]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [second >> 32 ^ words[1] ^ key[0], second & _MASK, first >> 32 ^ words[3] ^ key[1], first & _MASK]
        key = [key[0] + 0x9E3779B9 & _MASK, key[1] + 0xBB67AE85 & _MASK]
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


def _check(logits: Tensor, sampling: SamplingTensors, penalties: Penalties | None) -> None:
    check_logits(logits)
    rows, vocab_size = logits.shape
    dtypes = {
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float64,
        "min_p": torch.float32,
        "seeds": torch.int64,
        "indices": torch.int32,
        "positions": torch.int32,
    }
    for name, dtype in dtypes.items():
        check_vector(getattr(sampling, name), f"sampling.{name}", rows, dtype, logits.device)
    if penalties is not None:
        check_vector(penalties.slots, "penalties.slots", rows, torch.int64, logits.device)
        require(penalties.token_counts.shape[1:] == (vocab_size,), "penalties.token_counts", "be [num_slots, vocab]")
        require(penalties.token_counts.is_contiguous(), "penalties.token_counts", "be contiguous")
