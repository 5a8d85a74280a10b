"""Host memory in large pages, where the system has them: fewer page faults, and fewer misses of the TLB.

A step reads weights, keys and values from all over it, each once.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_MAPPING = 64 * 2**20
_LINE = 64


def zeros_in_large_pages(num_bytes: int) -> Tensor:
    """Zeros, uint8 [num_bytes], in a mapping of their own, taken from the system only as they are first written.

    Raises MemoryError if the system refuses them.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refuses {num_bytes:,} bytes: {error.strerror}") from error
    # Not every system has them.
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class LargePages:
    """Memory for many tensors of one lifetime, side by side in mappings far larger than a page."""

    def __init__(self) -> None:
        self._free_memory = torch.empty(0, dtype=torch.uint8)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """A vector of `size` numbers, aligned to a cache line."""
        num_bytes = size * dtype.itemsize
        taken = -(-num_bytes // _LINE) * _LINE
        if taken > len(self._free_memory):
            self._free_memory = zeros_in_large_pages(max(taken, _MAPPING))
        memory, self._free_memory = self._free_memory[:num_bytes], self._free_memory[taken:]
        return memory.view(dtype)
