"""The part that the attention kernels share: online softmax of a tile of query rows over a sequence's pages."""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import AttentionRule, PagedKV
from quire_kernels._code_pairs import halve_rows, log_and_inverse, unpack_pairs
from quire_kernels._device import device_limits
from quire_kernels._shapes import next_power_of_2
from quire_kernels.kv_quantization import dequantize

# Below any score. Finite: infinity minus infinity would be NaN for a row that has seen no key yet.
LOWEST = tl.constexpr(-3e38)
# Values with smaller scales, of codes of 8 bits, count as if they had this one: its logarithm is finite.
LEAST_SCALE = tl.constexpr(2.0**-60)
# The base-2 logarithm of the largest weight of codes of 8 bits. In float16, weights from 2 ** -28 of it on are exact to
# 11 bits.
LARGEST_WEIGHT = tl.constexpr(14.0)
LOG2_E = tl.constexpr(math.log2(math.e))


class Pages(NamedTuple):
    """One sequence's pages in a kernel. Scales are None where the cache holds keys and values themselves."""

    key_cache: Any
    value_cache: Any
    key_scales: Any
    value_scales: Any
    table: Any
    cache_strides: Any  # of block, head, slot
    scale_strides: Any  # of block, head


class ScoreRule(NamedTuple):
    """Factor, cap and window of the scores in a kernel; the last two may be None."""

    scale: Any
    soft_cap: Any
    window: Any


@triton.jit  # type: ignore[untyped-decorator]
def attend_keys(  # type: ignore[no-untyped-def]
    b_query,  # [TILE_M, TILE_D]
    b_position,  # [TILE_M], of each row's query in its sequence
    pages,  # Pages
    kv_head,
    lowest,  # keys [lowest, highest) are read, and nothing else of the pages that hold them
    highest,
    full_begin,  # keys [full_begin, full_end) are seen by all rows; multiples of TILE_N, empty if the first is larger
    full_end,
    rule,  # ScoreRule
    b_sink,  # [TILE_M], one more score of each row, as an exponent of 2, of a key without a value; or None
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNPACKING: tl.constexpr,  # of `_code_pairs`, or None
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """Attention of each row over keys [lowest, highest): the weighted means of the values [TILE_M, TILE_D].

    Also the base-2 logarithm of each row's sum of exponentials [TILE_M]. A row that sees no key has zeros and the
    logarithm LOWEST.

    Codes of 8 bits are multiplied as they are. A key's scale multiplies its scores. A value's scale s is a part of the
    exponent: the weight of a value is exp2(score + log2(s) - maximum), where the maximum is of these exponents, so that
    no weight is too large or too small for 16 bits whatever the scales are. The sum of exponentials takes each weight
    divided by s.
    """
    # Of what is loaded: numbers, or pairs of codes
    IN_PAIRS: tl.constexpr = UNPACKING == "ptx" or UNPACKING == "portable"
    WIDTH: tl.constexpr = TILE_D // 2 if IN_PAIRS else TILE_D
    NUM_DIMS: tl.constexpr = HEAD_DIM // 2 if IN_PAIRS else HEAD_DIM
    IS_INT8: tl.constexpr = pages.key_cache.dtype.element_ty == tl.int8
    p_keys, p_values = pages.key_cache, pages.value_cache
    stride_block, stride_head, stride_slot = pages.cache_strides
    score_scale = rule.scale
    if IN_PAIRS:
        p_keys = p_keys.to(tl.pointer_type(tl.int16), bitcast=True)
        p_values = p_values.to(tl.pointer_type(tl.int16), bitcast=True)
        stride_block, stride_head, stride_slot = stride_block >> 1, stride_head >> 1, stride_slot >> 1
        b_query, b_odd_query, b_factor = halve_rows(b_query, TILE_M, TILE_D)
        score_scale = (b_factor * score_scale)[:, None]
        b_odd_output = tl.zeros([TILE_M, WIDTH], tl.float32)
    o_dim = tl.arange(0, WIDTH)
    m_dim = o_dim < NUM_DIMS
    o_head = kv_head * stride_head
    b_max = tl.full([TILE_M], LOWEST, tl.float32)
    b_sum = tl.zeros([TILE_M], tl.float32)
    b_output = tl.zeros([TILE_M, WIDTH], tl.float32)
    # What a row sees of the keys [lowest, highest)
    b_last = tl.minimum(b_position, highest - 1)
    if rule.window is not None:
        b_first = tl.maximum(b_position - rule.window + 1, lowest)
    for start in range(lowest // TILE_N * TILE_N, highest, TILE_N):
        b_block, o_slot = rows_of_tile(start, lowest, highest, rule.window, pages.table, BLOCK_SIZE, TILE_N)
        # [TILE_N, WIDTH]
        o_cache = (b_block * stride_block)[:, None] + ((o_slot * stride_slot)[:, None] + (o_head + o_dim)[None, :])
        b_key = load_rows(p_keys + o_cache, m_dim, NUM_DIMS < WIDTH)
        # [TILE_M, TILE_N]
        if not IN_PAIRS:
            b_score = tl.dot(b_query, tl.trans(b_key.to(b_query.dtype)), input_precision="ieee")
        else:
            b_even, b_odd = unpack_pairs(b_key, IS_INT8, UNPACKING)
            b_score = tl.dot(b_query, tl.trans(b_even))
            b_score = tl.dot(b_odd_query, tl.trans(b_odd), b_score)
        if pages.key_scales is not None:
            # [TILE_N]
            o_scale = b_block * pages.scale_strides[0] + kv_head * pages.scale_strides[1] + o_slot
            b_score *= tl.load(pages.key_scales + o_scale)[None, :]
        if rule.soft_cap is not None:
            # cap * tanh(x / cap), by tanh(y) = 1 - 2 / (exp(2 y) + 1), which is correct at both infinities
            b_score = rule.soft_cap - 2.0 * rule.soft_cap / (tl.exp2(b_score * score_scale) + 1.0)
            factor = 1.0
        elif pages.value_scales is None:
            # Applied after the maximum, so that it is one instruction with the subtraction
            factor = rule.scale
        else:
            # One instruction with the addition of the values' scales
            b_score *= score_scale
            factor = 1.0
        if pages.value_scales is not None:
            b_scale = tl.load(pages.value_scales + o_scale)
            b_scale = tl.maximum(b_scale, LEAST_SCALE, propagate_nan=tl.PropagateNan.ALL)
            b_log_scale, b_inverse_scale = log_and_inverse(b_scale, UNPACKING)
            b_score += b_log_scale[None, :]
        is_cut = start >= full_end
        if rule.window is not None:
            is_cut |= start < full_begin
        # A branch: a mask of all tiles would be a sixth of a prefill's instructions (ptxas for sm_90)
        if is_cut:
            o_key = tl.arange(0, TILE_N)
            m_visible = o_key[None, :] <= (b_last - start)[:, None]
            if rule.window is not None:
                m_visible &= o_key[None, :] >= (b_first - start)[:, None]
            b_score = tl.where(m_visible, b_score, float("-inf"))

        # Online softmax, in powers of two
        b_tile_max = tl.max(b_score, axis=1) * factor
        if pages.value_scales is not None:
            b_tile_max -= LARGEST_WEIGHT
        b_new_max = tl.maximum(b_max, b_tile_max)
        b_weight = tl.exp2(b_score * factor - b_new_max[:, None])
        b_decay = tl.exp2(b_max - b_new_max)
        b_max = b_new_max
        if pages.value_scales is None:
            b_sum = b_sum * b_decay + tl.sum(b_weight, axis=1)
        else:
            b_sum = b_sum * b_decay + tl.sum(b_weight * b_inverse_scale[None, :], axis=1)
        # [TILE_N, WIDTH]
        b_value = load_rows(p_values + o_cache, m_dim, NUM_DIMS < WIDTH)
        b_weight = b_weight.to(b_query.dtype)
        if not IN_PAIRS:
            b_value = b_value.to(b_query.dtype)
            b_output = tl.dot(b_weight, b_value, b_output * b_decay[:, None], input_precision="ieee")
        else:
            b_even, b_odd = unpack_pairs(b_value, IS_INT8, UNPACKING)
            b_output = tl.dot(b_weight, b_even, b_output * b_decay[:, None])
            b_odd_output = tl.dot(b_weight, b_odd, b_odd_output * b_decay[:, None])
    if b_sink is not None:
        # After the loop, which then is that of a model without sinks
        b_new_max = tl.maximum(b_max, b_sink)
        b_decay = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_decay + tl.exp2(b_sink - b_new_max)
        b_output *= b_decay[:, None]
        if IN_PAIRS:
            b_odd_output *= b_decay[:, None]
        b_max = b_new_max
    b_sum = tl.where(b_sum > 0.0, b_sum, 1.0)
    if IN_PAIRS:
        b_output = tl.reshape(tl.join(b_output, b_odd_output), [TILE_M, TILE_D])
    return b_output / b_sum[:, None], b_max + tl.log2(b_sum)


@triton.jit  # type: ignore[untyped-decorator]
def rows_of_tile(  # type: ignore[no-untyped-def]
    start, lowest, highest, window, p_table, BLOCK_SIZE: tl.constexpr, TILE_N: tl.constexpr
):
    """The blocks of a tile's keys, of one number where the tile lies in one, and their slots [TILE_N].

    Keys beyond those to read are the nearest of them, so that no load of rows needs a mask.
    """
    # Without signs, since a division by a power of two is one instruction then
    o_row = tl.minimum(tl.arange(0, TILE_N), highest - 1 - start)
    if window is not None:
        o_row = tl.maximum(o_row, lowest - start)
    o_row = o_row.to(tl.uint32)
    o_kv = start + o_row
    o_page = start // BLOCK_SIZE if BLOCK_SIZE % TILE_N == 0 else o_kv // BLOCK_SIZE
    o_slot = o_row % BLOCK_SIZE if TILE_N % BLOCK_SIZE == 0 else o_kv % BLOCK_SIZE
    # 64 bits: a block's stride spans all layers
    return tl.load(p_table + o_page).to(tl.uint32).to(tl.int64), o_slot


@triton.jit  # type: ignore[untyped-decorator]
def load_rows(p_rows, m_dim, MASK_DIMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of rows [rows, dims], zero where masked. No mask where none is needed: it costs registers and
    comparisons.
    """
    if MASK_DIMS:
        return tl.load(p_rows, mask=m_dim[None, :], other=0.0)
    else:  # noqa: RET505  Triton wants each return in a branch of its own
        return tl.load(p_rows)


def score_parameters(scale: float, soft_cap: float | None) -> tuple[float, float | None]:
    """`score_scale` and `soft_cap` of `attend_keys`, which works in powers of two."""
    if soft_cap is None:
        return scale * math.log2(math.e), None
    return 2.0 * math.log2(math.e) * scale / soft_cap, soft_cap * math.log2(math.e)


def tile_dims(head_dim: int) -> int:
    """TILE_D: a power of two, and the 16 that tl.dot wants at least."""
    tile_d: int = next_power_of_2(head_dim)
    return max(16, tile_d)


def tile_keys(head_dim: int, dtype: torch.dtype) -> int:
    """TILE_N, given the dtype that is computed in: from 16 to 128 keys, of 16 KiB in 16 bits and 8 KiB in float32.

    In 16 bits, 64 keys of Llama's. Float32 products run without tensor cores, and spill registers from larger tiles
    (ptxas for sm_90). It depends on nothing else, so that a context is always cut into the same tiles.
    """
    elements = 2048 if dtype == torch.float32 else 8192
    return max(16, min(128, elements // tile_dims(head_dim)))


def tile_queries(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device) -> int:
    """The rows of a prefill's tile, TILE_M of `attend_keys`: 128, or 32 in float32; fewer where they would take more
    than half of the device's shared memory, or spill registers.

    They share each page that is loaded: with 64, all of an H200's multiprocessors would ask about 8 TB/s of its L2
    cache at 500 TFLOP/s.
    """
    rows, tile_d = 32 if dtype == torch.float32 else 128, tile_dims(head_dim)
    # Codes of 8 bits take registers until they are converted.
    if cache_dtype.itemsize == 1:
        rows = min(rows, 16 if dtype == torch.float32 else 128 * 128 // tile_d)
    while 2 * rows * tile_d * dtype.itemsize > device_limits(device).shared_memory:
        rows //= 2
    return rows


def prefill_tile_keys(
    tile_m: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> int:
    """TILE_N of a prefill with so many rows: up to 128 keys where two tiles of keys, two of values and the queries take
    three quarters of the device's shared memory at most; else as many as in decodes. Of codes of 8 bits at most 64, or
    registers would spill.

    With 128 keys, what a loop does once for each tile counts half: for Llama's heads it has 23 % fewer instructions
    for each key (ptxas for sm_90).
    """
    tile_n, tile_d = tile_keys(head_dim, dtype), tile_dims(head_dim)
    if cache_dtype.itemsize == 1:
        return min(tile_n, 64)
    more = min(128, 2 * tile_n)
    taken = (tile_m + 2 * 2 * more) * tile_d * dtype.itemsize
    return more if dtype != torch.float32 and 4 * taken <= 3 * device_limits(device).shared_memory else tile_n


def launch_options(
    tile_m: int, tile_n: int, tile_d: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """num_warps and num_stages of a kernel around `attend_keys`.

    Chosen by the code that Triton and ptxas generate for sm_90. Fewer warps spill registers, with many rows or where
    float32 products run without tensor cores. Of 5 stages one is for the block tables, and at most 3 tiles of keys and
    of values are kept, so that loads are two tiles ahead of the products; of 3 stages, 2 tiles.
    """
    queries, keys = tile_m * tile_d * dtype.itemsize, tile_n * tile_d * dtype.itemsize
    fits = queries + 3 * 2 * keys + 4096 <= device_limits(device).shared_memory
    # Codes of 8 bits take registers until they are converted: with many rows, 5 stages would spill.
    if cache_dtype.itemsize == 1 and tile_m > 16 and tile_d > 64:
        fits = False
    many = tile_m >= 128 or tile_m * tile_d > 64 * 128 or dtype == torch.float32
    options = {"num_warps": 8 if many else 4, "num_stages": 5 if fits else 3}
    if 2 * keys + 4096 > device_limits(device).shared_memory:
        # A tile of keys and one of values do not fit together, as where heads of 512 dimensions are float32.
        options["num_stages"] = 1
    return options


def attend_reference(query: Tensor, kv: PagedKV, table: Tensor, context_len: int, rule: AttentionRule) -> Tensor:
    """The attention of one sequence's queries [num_queries, num_heads, head_dim], in float32 throughout."""
    block_size, window = kv.key_cache.shape[2], rule.window
    num_queries, num_heads, _ = query.shape
    first_page = 0
    if window is not None:
        first_page = max(0, context_len - num_queries + 1 - window) // block_size
    keys = _pages(kv.key_cache, kv.key_scales, table, first_page, context_len)
    values = _pages(kv.value_cache, kv.value_scales, table, first_page, context_len)
    group = num_heads // len(keys)
    key_position = torch.arange(first_page * block_size, context_len, device=query.device)
    position = torch.arange(context_len - num_queries, context_len, device=query.device)[:, None]
    hidden = key_position > position
    if window is not None:
        hidden |= key_position <= position - window
    score = torch.einsum("qhd,hkd->hqk", query.float(), keys.repeat_interleave(group, dim=0)) * rule.scale
    if rule.soft_cap is not None:
        score = rule.soft_cap * torch.tanh(score / rule.soft_cap)
    score = score.masked_fill(hidden, -math.inf)
    if rule.sinks is not None:
        score = torch.cat((score, rule.sinks[:, None, None].expand(-1, num_queries, 1)), -1)
    weight = score.softmax(-1)[..., : len(key_position)]
    # Keys that no query sees may hold NaN
    seen = ~hidden.all(0)
    values = values[:, seen].repeat_interleave(group, dim=0)
    return torch.einsum("hqk,hkd->qhd", weight[:, :, seen], values)


def _pages(cache: Tensor, scales: Tensor | None, table: Tensor, first_page: int, context_len: int) -> Tensor:
    """[num_kv_heads, keys of the pages from the first on, head_dim] in float32."""
    block_size = cache.shape[2]
    blocks = table[first_page : -(-context_len // block_size)].long()
    pages = dequantize(cache[blocks], None if scales is None else scales[blocks])
    return pages.transpose(0, 1).flatten(1, 2)[:, : context_len - first_page * block_size]
