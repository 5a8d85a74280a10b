"""Normalises and stores a step's latent vectors, and rotates their keys and the queries by their positions.

Multi-head latent attention: see `_attend_latent`. Rotary position embedding as in `rotary_store`, but for pairs of
rotated dimensions that may be neighbours: these are reordered into halves, in queries and keys alike, which changes no
score.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import PagedKV, check_cache, check_index, check_like, require
from quire_kernels._shapes import check_rows, check_vector, next_power_of_2
from quire_kernels.kv_quantization import MAX_CODES, TINY, quantize
from quire_kernels.row_norm import RowNorm, row_norm_reference


@triton.jit  # type: ignore[untyped-decorator]
def _stored(b_values, b_factor, code_dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of the cache, rounded as `kv_quantization.quantize_rows` does where they are codes."""
    if b_factor is not None:
        b_values = b_values * b_factor
        if code_dtype == tl.int8:
            b_values = tl.floor(b_values + 0.5)
    return b_values.to(code_dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _latent_store_kernel(  # type: ignore[no-untyped-def]
    p_query,  # of the first rotated dimension
    p_rotated,
    p_compressed,
    p_weight,
    p_positions,
    p_frequencies,
    p_cache,
    p_scales,
    p_slots,
    epsilon,
    attention_factor,
    stride_query_token,
    stride_query_head,
    stride_rotated_token,
    stride_rotated_head,
    stride_compressed,
    stride_cache_block,
    stride_cache_slot,
    stride_scale_block,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_CODE: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + token)
    o_head = tl.arange(0, TILE_H)
    o_half = tl.arange(0, TILE_HALF)
    m_half = o_half < HALF
    # Where the first and the second of each pair are
    STEP: tl.constexpr = 2 if NEIGHBOURS else 1
    SECOND: tl.constexpr = 1 if NEIGHBOURS else HALF
    # [TILE_HALF]; sine and cosine as in `rotary_store`
    b_angle = tl.load(p_positions + token).to(tl.float32) * tl.load(p_frequencies + o_half, mask=m_half, other=0.0)
    b_cosine = tl.cos(b_angle) * attention_factor
    b_sine = tl.sin(b_angle) * attention_factor

    # [TILE_H, TILE_HALF]
    m_query = (o_head < NUM_HEADS)[:, None] & m_half[None, :]
    p_pair = p_rotated + token * stride_rotated_token + o_head[:, None] * stride_rotated_head + STEP * o_half[None, :]
    b_first = tl.load(p_pair, mask=m_query, other=0.0).to(tl.float32)
    b_second = tl.load(p_pair + SECOND, mask=m_query, other=0.0).to(tl.float32)
    b_left = b_first * b_cosine[None, :] - b_second * b_sine[None, :]
    b_right = b_second * b_cosine[None, :] + b_first * b_sine[None, :]
    p_turned = p_query + token * stride_query_token + o_head[:, None] * stride_query_head + o_half[None, :]
    tl.store(p_turned, b_left.to(p_query.dtype.element_ty), mask=m_query)
    tl.store(p_turned + HALF, b_right.to(p_query.dtype.element_ty), mask=m_query)
    if slot < 0:
        return

    # [TILE_R]
    o_rank = tl.arange(0, TILE_R)
    m_rank = o_rank < RANK
    p_row = p_compressed + token * stride_compressed
    b_latent = tl.load(p_row + o_rank, mask=m_rank, other=0.0).to(tl.float32)
    b_latent *= tl.rsqrt(tl.sum(b_latent * b_latent) / RANK + epsilon)
    b_latent *= tl.load(p_weight + o_rank, mask=m_rank, other=0.0).to(tl.float32)
    # [TILE_HALF]
    b_first = tl.load(p_row + RANK + STEP * o_half, mask=m_half, other=0.0).to(tl.float32)
    b_second = tl.load(p_row + RANK + SECOND + STEP * o_half, mask=m_half, other=0.0).to(tl.float32)
    b_left = b_first * b_cosine - b_second * b_sine
    b_right = b_second * b_cosine + b_first * b_sine

    # In 64 bits: a block's stride spans all layers
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    if p_scales is not None:
        largest = tl.maximum(tl.max(tl.abs(b_latent)), tl.maximum(tl.max(tl.abs(b_left)), tl.max(tl.abs(b_right))))
        factor = MAX_CODE / tl.maximum(largest, TINY)
        tl.store(p_scales + block * stride_scale_block + offset, largest / MAX_CODE)
    else:
        factor = None
    p_stored = p_cache + block * stride_cache_block + offset * stride_cache_slot
    code_dtype: tl.constexpr = p_cache.dtype.element_ty
    tl.store(p_stored + o_rank, _stored(b_latent, factor, code_dtype), mask=m_rank)
    tl.store(p_stored + RANK + o_half, _stored(b_left, factor, code_dtype), mask=m_half)
    tl.store(p_stored + RANK + HALF + o_half, _stored(b_right, factor, code_dtype), mask=m_half)


def latent_store(
    compressed: Tensor,
    rotated: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    norm: RowNorm,
    key_cache: Tensor,
    slots: Tensor,
    query: Tensor,
    *,
    rotates_neighbours: bool,
    attention_factor: float = 1.0,
    key_scales: Tensor | None = None,
) -> None:
    """Writes each token's latent vector and rotated key to its slot of the cache, and its rotated queries to `query`.

    Args:
        compressed: [num_tokens, rank + rotated dimensions], last dimension contiguous: latent vectors before their
            norm, and keys before their rotation.
        rotated: [num_tokens, num_heads, rotated dimensions], last dimension contiguous: the parts of queries to rotate.
        positions: int64 [num_tokens].
        frequencies: float32 [rotated dimensions / 2], radians per position.
        norm: of latent vectors, without a bias and not centred.
        key_cache: [num_blocks, 1, block_size, rank + rotated dimensions], one layer's view, of the dtype of
            `compressed`, or int8 or float8_e4m3fn with scales.
        slots: int64 [num_tokens], block * block_size + offset in the block, or -1 for a token that is not stored.
            No two tokens may share a slot.
        query: [num_tokens, num_heads, rank + rotated dimensions], last dimension contiguous; of each head the last
            dimensions are written.
        rotates_neighbours: whether pairs are (2i, 2i + 1), and otherwise (i, i + rotated dimensions / 2).
        attention_factor: what rotated queries and keys are multiplied by.
        key_scales: float32 [num_blocks, 1, block_size], one layer's view, for a cache in 8 bits (`kv_quantization`);
            written beside it.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device. The slots' values are not checked.
    """
    _check(compressed, rotated, positions, frequencies, norm, key_cache, slots, query, key_scales)
    num_tokens, num_heads, width = query.shape
    if num_tokens == 0:
        return
    half = len(frequencies)
    rank = width - 2 * half
    _latent_store_kernel[(num_tokens,)](
        query[..., rank:],
        rotated,
        compressed,
        norm.weight,
        positions,
        frequencies,
        key_cache,
        key_scales,
        slots,
        norm.epsilon,
        attention_factor,
        query.stride(0),
        query.stride(1),
        rotated.stride(0),
        rotated.stride(1),
        compressed.stride(0),
        key_cache.stride(0),
        key_cache.stride(2),
        0 if key_scales is None else key_scales.stride(0),
        NUM_HEADS=num_heads,
        RANK=rank,
        HALF=half,
        NEIGHBOURS=rotates_neighbours,
        BLOCK_SIZE=key_cache.shape[2],
        MAX_CODE=MAX_CODES.get(key_cache.dtype),
        TILE_H=next_power_of_2(num_heads),
        TILE_R=next_power_of_2(rank),
        TILE_HALF=next_power_of_2(half),
        # With 4 warps, 128 heads spill registers (ptxas for sm_90).
        num_warps=8 if num_heads * half > 2048 else 4,
    )


def latent_store_reference(
    compressed: Tensor,
    rotated: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    norm: RowNorm,
    key_cache: Tensor,
    slots: Tensor,
    query: Tensor,
    *,
    rotates_neighbours: bool,
    attention_factor: float = 1.0,
    key_scales: Tensor | None = None,
) -> None:
    """`latent_store` in plain torch, in float32 throughout."""
    _check(compressed, rotated, positions, frequencies, norm, key_cache, slots, query, key_scales)
    half, block_size = len(frequencies), key_cache.shape[2]
    rank = query.shape[2] - 2 * half
    angle = (positions[:, None].float() * frequencies)[:, None]
    cosine, sine = angle.cos() * attention_factor, angle.sin() * attention_factor
    # The key is one more head beside the queries.
    heads = torch.cat((rotated, compressed[:, None, rank:]), 1).float()
    shape = heads.shape[:2]
    pairs = heads.view(*shape, half, 2).transpose(-1, -2) if rotates_neighbours else heads.view(*shape, 2, half)
    first, second = pairs.unbind(-2)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    query[..., rank:] = turned[:, :-1]
    latent = row_norm_reference(compressed[:, :rank].float(), norm, torch.float32)
    rows = torch.cat((latent, turned[:, -1]), -1)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot < 0:
            continue
        place = slot // block_size, 0, slot % block_size
        if key_scales is None:
            key_cache[place] = row
        else:
            key_cache[place], key_scales[place] = quantize(row, key_cache.dtype)


def _check(
    compressed: Tensor,
    rotated: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    norm: RowNorm,
    key_cache: Tensor,
    slots: Tensor,
    query: Tensor,
    key_scales: Tensor | None,
) -> None:
    check_cache(PagedKV(key_cache, key_cache, key_scales, key_scales))
    require(key_cache.shape[1] == 1, "key_cache", "have one KV head")
    check_rows(compressed, "compressed")
    check_like(compressed, key_cache, "compressed")
    num_tokens, width = compressed.shape
    require(width == key_cache.shape[3], "compressed", "have the width of key_cache")
    dims = 2 * frequencies.numel()
    require(0 < dims < width, "frequencies", f"be of 1 to {(width - 1) // 2} pairs")
    check_vector(frequencies, "frequencies", dims // 2, torch.float32, compressed.device)
    require(rotated.ndim == 3, "rotated", "be [num_tokens, num_heads, rotated dimensions]")
    num_heads = rotated.shape[1]
    for tensor, argument, shape in (
        (rotated, "rotated", (num_tokens, num_heads, dims)),
        (query, "query", (num_tokens, num_heads, width)),
    ):
        require(tuple(tensor.shape) == shape, argument, f"have shape {list(shape)}")
        require(tensor.dtype == compressed.dtype, argument, "have the dtype of compressed")
        require(tensor.stride(2) == 1, argument, "be contiguous in its last dimension")
        require(tensor.device == compressed.device, argument, "be on the device of compressed")
    require(norm.bias is None and not norm.is_centered, "norm", "have no bias, and not be centred")
    require(norm.weight.is_contiguous(), "norm", "have a contiguous weight")
    require(tuple(norm.weight.shape) == (width - dims,), "norm", f"have a weight of {width - dims} numbers")
    check_index(positions, key_cache, (num_tokens,), torch.int64, "positions")
    check_index(slots, key_cache, (num_tokens,), torch.int64, "slots")
