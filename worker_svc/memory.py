"""The cache of keys and values, and how many blocks it gets: measured by a run of the largest step."""

import gc
import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.errors import CannotServe
from worker_svc.host import available_memory
from worker_svc.model.layout import ModelLayout


class OutOfMemory(CannotServe):
    """Not even one sequence's blocks fit. The text is for the operator."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The layout of the cache: a block is contiguous over all layers."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, layout: ModelLayout, block_size: int, dtype: torch.dtype) -> "CacheShape":
        """The layout for a model."""
        return cls(len(layout.layers), layout.num_kv_heads, block_size, layout.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """A cache [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], all zeros.

        On a processor its memory is taken from the system only as blocks are first written.
        """
        shape = (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        # torch.zeros would write all of it.
        memory = mmap.mmap(-1, num_blocks * self.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Fewer page faults and misses of the TLB, since a step reads all over it. Not every system has large pages.
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How much memory the cache may take.

    `fraction` is of the whole GPU, weights and activations included; on a processor, of the memory that is available
    once the model is loaded, and there no more than `cpu_bytes`. None: 0.9 on a GPU, 0.4 on a processor.
    """

    fraction: float | None
    cpu_bytes: int


def count_blocks(block_bytes: int, budget: MemoryBudget, device: torch.device, profile: Callable[[], object]) -> int:
    """How many blocks fit beside what `profile`, a run of the largest step, needs at its peak. It returns what ran."""
    if device.type == "cuda":
        memory = _free_on_gpu(budget, device, profile)
    else:
        kept = profile()
        memory = min(budget.cpu_bytes, int(available_memory() * (budget.fraction or 0.4)))
        del kept
    return max(0, memory // block_bytes)


def _free_on_gpu(budget: MemoryBudget, device: torch.device, profile: Callable[[], object]) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    kept = profile()
    torch.cuda.synchronize(device)
    # Captured graphs reserve memory that counts as allocated only while they are captured.
    peak = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    # Held by the driver, by kernels' own workspaces, by graphs themselves, and by other processes.
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    del kept
    gc.collect()
    torch.cuda.empty_cache()
    return int(total * (budget.fraction or 0.9)) - elsewhere - peak
