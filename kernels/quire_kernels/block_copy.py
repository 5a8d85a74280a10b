"""Copies whole blocks of the KV cache, all layers of a block at once: within the cache, or into or out of a buffer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import ceil_div, check_blocks, check_same_blocks, next_power_of_2

# Bytes that one thread loads at once. Blocks are copied as integers, whatever their dtype.
_VECTOR_BYTES = 16
_WORD = torch.int64


@triton.jit  # type: ignore[untyped-decorator]
def _block_copy_kernel(  # type: ignore[no-untyped-def]
    p_source,
    p_destination,
    p_pairs,
    BLOCK_WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    # Offsets in 64 bits: a cache has more than 2^31 words
    pair = tl.program_id(0).to(tl.int64)
    source = tl.load(p_pairs + 2 * pair).to(tl.int64)
    destination = tl.load(p_pairs + 2 * pair + 1).to(tl.int64)
    o_word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_word = o_word < BLOCK_WORDS
    # [TILE]
    b_words = tl.load(p_source + source * BLOCK_WORDS + o_word, mask=m_word)
    tl.store(p_destination + destination * BLOCK_WORDS + o_word, b_words, mask=m_word)


def block_copy(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copies block `pairs[i, 0]` of the source to block `pairs[i, 1]` of the destination, for all i in one launch.

    Source and destination may be the same tensor: copies run in no order, so then no pair's destination may be
    another pair's source. No two pairs may share a destination.

    Args:
        source, destination: [num_blocks, ...], contiguous, of one block shape and any dtype, on one device. A block's
            size must be a multiple of 16 bytes: they move 16 at a time.
        pairs: int64 or int32 [num_pairs, 2], contiguous.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device. The pairs' values are not checked:
            that would wait for the GPU.
    """
    check_blocks(source, "source")
    check_blocks(destination, "destination")
    check_same_blocks(destination, source, "destination", "source")
    require(destination.device == source.device, "destination", "be on the device of source")
    block_bytes = source[:1].numel() * source.element_size()
    require(block_bytes % _VECTOR_BYTES == 0, "source", f"have blocks of a multiple of {_VECTOR_BYTES} bytes")
    require(source.data_ptr() % _VECTOR_BYTES == 0, "source", f"start at a multiple of {_VECTOR_BYTES} bytes")
    require(destination.data_ptr() % _VECTOR_BYTES == 0, "destination", f"start at a multiple of {_VECTOR_BYTES} bytes")
    require(pairs.ndim == 2 and pairs.shape[1] == 2, "pairs", "be [num_pairs, 2]")
    require(pairs.dtype in (torch.int64, torch.int32), "pairs", "be int64 or int32")
    require(pairs.is_contiguous(), "pairs", "be contiguous")
    require(pairs.device == source.device, "pairs", "be on the device of source")
    if pairs.shape[0] == 0 or block_bytes == 0:
        return
    block_words = block_bytes // _WORD.itemsize
    # 16 KiB a program: eight loads of 16 bytes in flight for each thread of four warps
    tile = min(2048, next_power_of_2(block_words))
    _block_copy_kernel[(pairs.shape[0], ceil_div(block_words, tile))](
        source.view(source.shape[0], -1).view(_WORD),
        destination.view(destination.shape[0], -1).view(_WORD),
        pairs,
        BLOCK_WORDS=block_words,
        TILE=tile,
        num_warps=4,
    )


def block_copy_reference(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """`block_copy` pair by pair in plain torch."""
    for source_block, destination_block in pairs.tolist():
        destination[destination_block] = source[source_block]
