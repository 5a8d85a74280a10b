"""Returns memory that is not needed any more to the system: that of blocks, and what the C library keeps."""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache

from torch import Tensor


def release_blocks(blocks: Tensor, block_ids: Iterable[int]) -> None:
    """Returns the pages that lie within these blocks, of uint8 [num_blocks, block_bytes] in a private mapping.

    They read as zeros afterwards, and take memory again when they are written. Does nothing where the system cannot.
    """
    if sys.platform != "linux":
        return
    block_bytes, start = blocks.shape[1], blocks.data_ptr()
    for first, end in _runs(block_ids):
        # Pages at the ends may hold parts of other blocks.
        begin = -(-(start + first * block_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (start + end * block_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if size > 0:
            _c_library().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Returns what the C library keeps of freed memory. Does nothing where it cannot: only glibc does."""
    with suppress(AttributeError, OSError):
        _c_library().malloc_trim(ctypes.c_size_t(0))


def _runs(block_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Consecutive numbers as ranges: the first, and the one after the last."""
    first = end = -1
    for block_id in sorted(block_ids):
        if block_id != end:
            if end > first:
                yield first, end
            first = block_id
        end = block_id + 1
    if end > first:
        yield first, end


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
