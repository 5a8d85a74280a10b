"""The part that the kernels of latent attention share: online softmax of a tile of query rows over latent vectors.

In multi-head latent attention (arXiv:2405.04434, section 2.1) the cache holds one row of each token, for all heads: its
latent vector, and behind it a rotated key. Scores are products with the whole row, values are the latent vector: a tile
of it is loaded once for both.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._attend import LOWEST, attend_reference, load_rows, rows_of_tile, tile_dims
from quire_kernels._checks import AttentionRule, PagedKV, check_cache, check_heads, check_index, require
from quire_kernels._device import device_limits
from quire_kernels._shapes import next_power_of_2
from quire_kernels.kv_quantization import MAX_CODES

# Sums of a tile of query rows over larger latent vectors do not fit the registers of a multiprocessor.
MAX_RANK = 512
OTHER_SHARED_BYTES = 4096
"""Of shared memory that a kernel takes besides its queries and rows of the cache, with those that NVIDIA's GPUs reserve
for each program; `make aot` checks the sum."""


class LatentPages(NamedTuple):
    """One sequence's pages in a kernel. `scales` is None where the cache holds the rows themselves."""

    cache: Any
    scales: Any
    table: Any
    stride_block: Any
    stride_slot: Any
    stride_scale_block: Any


@triton.jit  # type: ignore[untyped-decorator]
def attend_latents(  # type: ignore[no-untyped-def]
    b_query,  # [TILE_M, TILE_R], against latent vectors
    b_rotated_query,  # [TILE_M, TILE_P], against rotated keys
    b_position,  # [TILE_M], of each row's query in its sequence
    pages,  # LatentPages
    lowest,  # rows [lowest, highest) of the sequence are read; a multiple of TILE_N
    highest,
    full_end,  # rows before it are seen by all queries; a multiple of TILE_N
    score_scale,  # times log2(e)
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_CODE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_P: tl.constexpr,
):
    """Attention of each query row: the weighted means of latent vectors [TILE_M, TILE_R], and the base-2 logarithms of
    the sums of exponentials [TILE_M]. A query that sees nothing has zeros and the logarithm LOWEST.
    """
    o_rank = tl.arange(0, TILE_R)
    o_rotated = tl.arange(0, TILE_P)
    b_max = tl.full([TILE_M], LOWEST, tl.float32)
    b_sum = tl.zeros([TILE_M], tl.float32)
    b_output = tl.zeros([TILE_M, TILE_R], tl.float32)
    # What a query sees of the rows to read
    b_last = tl.minimum(b_position, highest - 1)
    for start in range(lowest, highest, TILE_N):
        b_block, o_slot = rows_of_tile(start, lowest, highest, None, pages.table, BLOCK_SIZE, TILE_N)
        p_row = pages.cache + (b_block * pages.stride_block + o_slot * pages.stride_slot)

        # [TILE_N, TILE_P], [TILE_N, TILE_R]
        b_rotated = load_rows(p_row[:, None] + RANK + o_rotated[None, :], o_rotated < ROTATED, ROTATED < TILE_P)
        b_rotated = b_rotated.to(b_query.dtype)
        b_latent = load_rows(p_row[:, None] + o_rank[None, :], o_rank < RANK, RANK < TILE_R).to(b_query.dtype)
        # [TILE_M, TILE_N]
        b_score = tl.dot(b_rotated_query, tl.trans(b_rotated), input_precision="ieee")
        b_score = tl.dot(b_query, tl.trans(b_latent), b_score, input_precision="ieee")
        if pages.scales is not None:
            # [TILE_N]; one for a row, of its latent vector and its key
            b_scale = tl.load(pages.scales + (b_block * pages.stride_scale_block + o_slot))
            b_score *= b_scale[None, :]
        # A branch, as in `attend_keys`
        if start >= full_end:
            m_visible = tl.arange(0, TILE_N)[None, :] <= (b_last - start)[:, None]
            b_score = tl.where(m_visible, b_score, float("-inf"))

        # Online softmax, in powers of two
        b_new_max = tl.maximum(b_max, tl.max(b_score, axis=1) * score_scale)
        b_weight = tl.exp2(b_score * score_scale - b_new_max[:, None])
        b_decay = tl.exp2(b_max - b_new_max)
        b_max = b_new_max
        b_sum = b_sum * b_decay + tl.sum(b_weight, axis=1)
        if pages.scales is not None:
            # Times the largest code, or a small weight would be lost in float16; taken out again at the end
            b_weight *= (b_scale * MAX_CODE)[None, :]
        b_output = tl.dot(b_weight.to(b_query.dtype), b_latent, b_output * b_decay[:, None], input_precision="ieee")
    b_sum = tl.where(b_sum > 0.0, b_sum, 1.0)
    b_divisor = b_sum
    if pages.scales is not None:
        b_divisor = b_sum * MAX_CODE
    return b_output / b_divisor[:, None], b_max + tl.log2(b_sum)


class LatentTile(NamedTuple):
    """The tile of a program of latent attention."""

    num_heads: int
    """Of one query, in the tile."""
    rows: int
    """TILE_M: pairs of a query and a head."""
    keys: int
    """TILE_N"""
    rank: int
    """TILE_R"""
    rotated: int
    """TILE_P"""
    options: dict[str, int]
    """num_warps and num_stages."""

    @property
    def queries(self) -> int:
        """Of a sequence in a tile."""
        return self.rows // self.num_heads

    def launch_options(self, query: Tensor, key_cache: Tensor, rank: int) -> dict[str, Any]:
        """The constants of the kernels, and the options of their launch."""
        return {
            "NUM_HEADS": query.shape[1],
            "GROUP": self.num_heads,
            "RANK": rank,
            "ROTATED": query.shape[2] - rank,
            "BLOCK_SIZE": key_cache.shape[2],
            "MAX_CODE": MAX_CODES.get(key_cache.dtype),
            "TILE_M": self.rows,
            "TILE_N": self.keys,
            "TILE_R": self.rank,
            "TILE_P": self.rotated,
            **self.options,
        }


def latent_tile(
    num_heads: int,
    most_rows: int,
    rank: int,
    rotated: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> LatentTile:
    """The largest tile of at most `most_rows` rows whose queries and rows of the cache fit the device's shared memory.
    It depends on these arguments alone, so that a context is always cut into the same tiles.

    Chosen by the code that Triton and ptxas generate: of 64 rows the sums do not fit the registers (sm_90, sm_100), of
    4 warps neither. With 5 stages two tiles of the cache are kept, with 3 one.
    """
    tile_r, tile_p = tile_dims(rank), tile_dims(rotated)
    width, limit = tile_r + tile_p, device_limits(device).shared_memory - OTHER_SHARED_BYTES
    # Products in float32 run without tensor cores, and spill registers from more rows.
    exact = dtype == torch.float32
    rows, keys = (16, 16) if exact else (max(16, min(32, next_power_of_2(most_rows))), 32)
    while rows > 16 and 2 * rows * width * dtype.itemsize > limit:
        rows //= 2
    queries, row_bytes = rows * width * dtype.itemsize, latent_row_bytes(width, dtype, cache_dtype)
    while keys > 16 and queries + keys * row_bytes > limit:
        keys //= 2
    fits = queries + 2 * keys * row_bytes <= limit and not exact
    return LatentTile(
        min(num_heads, rows), rows, keys, tile_r, tile_p, {"num_warps": 8, "num_stages": 5 if fits else 3}
    )


def latent_row_bytes(width: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> int:
    """Shared memory for a row of the cache; where it is codes, they are converted into another one."""
    return width * (cache_dtype.itemsize + (dtype.itemsize if cache_dtype.itemsize == 1 else 0))


def latent_score_scale(scale: float) -> float:
    """`score_scale` of `attend_latents`, which works in powers of two."""
    return scale * math.log2(math.e)


def check_latents(
    query: Tensor,
    key_cache: Tensor,
    key_scales: Tensor | None,
    block_tables: Tensor,
    context_lens: Tensor,
    rank: int,
    scale: float,
    out: Tensor | None,
) -> None:
    """The arguments that `latent_attention` and `latent_decode` share."""
    check_cache(PagedKV(key_cache, key_cache, key_scales, key_scales))
    require(key_cache.shape[1] == 1, "key_cache", "have one KV head")
    check_heads(query, key_cache, "query")
    require(1 <= rank < query.shape[2], "rank", f"be 1 to {query.shape[2] - 1}")
    refused = unsupported_rank(rank)
    require(refused is None, "rank", f"be at most {MAX_RANK}")
    require(block_tables.ndim == 2, "block_tables", "be [num_seqs, max_blocks]")
    check_index(block_tables, key_cache, tuple(block_tables.shape), torch.int32, "block_tables")
    check_index(context_lens, key_cache, (len(block_tables),), torch.int32, "context_lens")
    require(scale > 0, "scale", "be positive")
    if out is not None:
        require(out.shape == (*query.shape[:2], rank), "out", f"be {[*query.shape[:2], rank]}")
        require(out.dtype == query.dtype, "out", "have the dtype of query")
        require(out.device == query.device, "out", "be on the device of query")
        require(out.stride(2) == 1, "out", "be contiguous in its last dimension")


def unsupported_rank(rank: int) -> str | None:
    """Why the Triton kernels cannot attend to latent vectors of `rank` dimensions; None: they can."""
    if rank <= MAX_RANK:
        return None
    return f"attention over latent vectors of {rank} dimensions: the most is {MAX_RANK}"


def attend_latents_reference(
    query: Tensor, cache: Tensor, scales: Tensor | None, table: Tensor, context_len: int, rank: int, scale: float
) -> Tensor:
    """The attention of one sequence's queries [num_queries, num_heads, rank], in float32 throughout."""
    kv, rule = PagedKV(cache, cache, scales, scales), AttentionRule(scale, None, None)
    return attend_reference(query, kv, table, context_len, rule)[..., :rank]
