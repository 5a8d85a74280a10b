"""The threshold of a row's weights by top-k, top-p and min-p, found without sorting or copying the row.

A token's weight is exp((logit - largest) / temperature): that of the argmax is 1. The bits of positive floats,
taken as integers, are in the floats' order, so the search is over integers. Each pass splits a bracket of them into
BUCKETS, all programs of the row measure the tokens of at least the weight of each piece's start, and the next pass
splits the piece in which the target is reached. After PASSES the bracket is a single weight, and tokens that share it
are all kept. Mostly it holds a single token after a few passes, and the rest return at once.

Weights are measured in units of 2^-44, as integers: their sums are exact, so neither the order of atomic additions nor
the way a row is split over programs changes the sampled token. Weights below one unit count as 0.
"""

import triton
import triton.language as tl

from quire_kernels._row_peaks import row_peak
from quire_kernels.adjust_logits import SUPPRESSED, is_number

PASSES = 8
BUCKETS = tl.constexpr(16)
# A record of a row's pass: BUCKETS measures, then the bracket that they split.
RECORD = tl.constexpr(20)

_UNIT = tl.constexpr(17592186044416.0)  # 2^44
# Bits of the floats 2^-44 and 1. 16^8 pieces are more than there are floats between.
_LEAST = tl.constexpr(0x29800000)
_ONE = tl.constexpr(0x3F800000)
MIN_TEMPERATURE = tl.constexpr(1e-5)


@triton.jit
def softmax_weight_bits(b_logits, peak, temperature):  # type: ignore[no-untyped-def]
    """Weights of the logits, as the bits of floats."""
    return tl.exp((b_logits - peak) / temperature).to(tl.int32, bitcast=True)


@triton.jit
def probability_mass(b_bits):  # type: ignore[no-untyped-def]
    """Weights in whole units: int64."""
    return (b_bits.to(tl.float32, bitcast=True) * _UNIT).to(tl.int64)


@triton.jit
def is_random(peak, temperature):  # type: ignore[no-untyped-def]
    """Whether a row with that peak is sampled by its weights."""
    return (temperature >= MIN_TEMPERATURE) & (peak > SUPPRESSED) & is_number(peak)


@triton.jit  # type: ignore[untyped-decorator]
def _narrow_bracket(p_record, limit, IS_FIRST: tl.constexpr, BY_MASS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bracket [low, high) after a pass, the measure above it, and the target."""
    o_bucket = tl.arange(0, BUCKETS)
    b_sums = tl.load(p_record + o_bucket)
    low = tl.load(p_record + BUCKETS)
    high = tl.load(p_record + BUCKETS + 1)
    above = tl.load(p_record + BUCKETS + 2)
    if IS_FIRST:
        total = tl.max(b_sums)
        if BY_MASS:
            share = limit * total.to(tl.float64)
            target = tl.minimum(tl.maximum(tl.ceil(share).to(tl.int64), 1), total)
        else:
            target = tl.minimum(limit.to(tl.int64), total)
    else:
        target = tl.load(p_record + BUCKETS + 3)
    if high - low > 1:
        # Measures fall from piece to piece; that of the first, from `low` on, reaches the target.
        place = tl.sum((above + b_sums >= target).to(tl.int64)) - 1
        beyond = tl.sum(tl.where(o_bucket == place + 1, b_sums, 0))
        within = tl.sum(tl.where(o_bucket == place, b_sums, 0)) - beyond
        step = (high - low + BUCKETS - 1) // BUCKETS
        low += place * step
        high = tl.minimum(high, low + step)
        above += beyond
        # Each token in the bracket measures at least its start: less than twice that is one token.
        least = probability_mass(low.to(tl.int32)) if BY_MASS else 1
        if within < 2 * least:
            high = low + 1
    return low, high, above, target


@triton.jit  # type: ignore[untyped-decorator]
def _top_k_threshold(p_records, row, num_rows, top_k, min_p, vocab_size, PASSES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The threshold of min-p and top-k, as the bits of a float."""
    threshold = tl.maximum(min_p.to(tl.int32, bitcast=True), _LEAST).to(tl.int64)
    if (top_k > 0) & (top_k < vocab_size):
        p_record = p_records + ((PASSES - 1) * num_rows + row) * RECORD
        low, _, _, _ = _narrow_bracket(p_record, top_k, False, False)
        threshold = tl.maximum(threshold, low)
    return threshold


@triton.jit  # type: ignore[untyped-decorator]
def sampling_threshold(  # type: ignore[no-untyped-def]
    p_records, row, num_rows, top_k, top_p, min_p, vocab_size, PASSES: tl.constexpr
):
    """The threshold after both searches, as the bits of a float."""
    threshold = _top_k_threshold(p_records, row, num_rows, top_k, min_p, vocab_size, PASSES)
    if top_p < 1.0:
        p_record = p_records + ((2 * PASSES - 1) * num_rows + row) * RECORD
        threshold, _, _, _ = _narrow_bracket(p_record, top_p, False, True)
    return threshold.to(tl.int32)


@triton.jit(do_not_specialize=["pass_index", "num_rows"])  # type: ignore[untyped-decorator]
def measure_kernel(  # type: ignore[no-untyped-def]
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
    pass_index,
    BY_MASS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_SECOND: tl.constexpr,
    PASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    """One pass of one search: top-k by count, then top-p by mass over what min-p and top-k keep."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(p_temperature + row)
    top_k = tl.load(p_top_k + row)
    top_p = tl.load(p_top_p + row)
    if BY_MASS:
        limit = top_p
        if top_p >= 1.0:
            return
    else:
        limit = top_k
        if (top_k <= 0) | (top_k >= vocab_size):
            return
    peak = row_peak(p_peaks, row, num_chunks, TILE_CHUNKS)
    if not is_random(peak, temperature):
        return
    p_record = p_records + ((PASSES if BY_MASS else 0) + pass_index.to(tl.int64)) * num_rows * RECORD + row * RECORD
    if IS_FIRST:
        if BY_MASS:
            low = _top_k_threshold(p_records, row, num_rows, top_k, tl.load(p_min_p + row), vocab_size, PASSES)
        else:
            low = tl.full([], _LEAST, tl.int64)
        high = tl.full([], _ONE + 1, tl.int64)
        above = tl.full([], 0, tl.int64)
        target = above
    else:
        low, high, above, target = _narrow_bracket(p_record - num_rows * RECORD, limit, IS_SECOND, BY_MASS)
    if chunk == 0:
        tl.store(p_record + BUCKETS, low)
        tl.store(p_record + BUCKETS + 1, high)
        tl.store(p_record + BUCKETS + 2, above)
        tl.store(p_record + BUCKETS + 3, target)
    largest = softmax_weight_bits(tl.load(p_peaks + row * num_chunks + chunk), peak, temperature)
    if (high - low <= 1) | (largest < low):
        return
    step = (high - low + BUCKETS - 1) // BUCKETS
    b_starts = (low + tl.arange(0, BUCKETS) * step).to(tl.int32)
    b_sums = tl.zeros([BUCKETS], tl.int64)
    for start in tl.range(0, CHUNK, TILE, num_stages=3):
        o_token = chunk * CHUNK + start + tl.arange(0, TILE)
        m_token = o_token < vocab_size
        # [TILE]
        b_logits = tl.load(p_logits + row * stride_logits + o_token, mask=m_token, other=float("-inf"))
        b_bits = softmax_weight_bits(b_logits, peak, temperature)
        b_measures = tl.where(b_bits < high, probability_mass(b_bits) if BY_MASS else 1, 0)
        # [BUCKETS, TILE]
        b_reached = tl.where(b_bits[None, :] >= b_starts[:, None], b_measures[None, :], 0)
        b_sums += tl.sum(b_reached, axis=1).to(tl.int64)
    tl.atomic_add(p_record + tl.arange(0, BUCKETS), b_sums, mask=b_sums > 0, sem="relaxed")
