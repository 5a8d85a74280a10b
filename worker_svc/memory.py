"""The number of blocks: on the device, measured by a run of the largest step, and in host memory."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_svc.errors import StartupFailed
from worker_svc.host_memory import available_memory

_GIB = 2**30
_MAX_DEFAULT_SWAP = 16 * _GIB


class OutOfMemory(StartupFailed):
    """The requested blocks, or even one block, do not fit. The text is for the operator."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How much memory the cache may take.

    `fraction` is of the whole GPU, weights and activations included; on a CPU, of the memory that is available after
    the model is loaded, but at most `cpu_bytes`. None: 0.9 on a GPU, 0.4 on a CPU.
    """

    fraction: float | None
    cpu_bytes: int
    limit: int | None = None
    """Bytes that the process may use; None: what its container or the machine has."""
    has_usual_steps: bool = False
    """Whether steps are no larger than by default."""


def count_blocks(block_bytes: int, budget: MemoryBudget, device: torch.device, profile: Callable[[], object]) -> int:
    """How many blocks fit with the peak of `profile`, a run of the largest step. What it returns is kept until
    then. On a CPU, steps of the usual sizes are not run where half of the memory suffices for the blocks.
    """
    memory = _free_on_gpu(budget, device, profile) if device.type == "cuda" else _share_of_host(budget, profile)
    return max(0, memory // block_bytes)


def count_host_blocks(
    block_bytes: int, num_blocks: int, swap_space: float | None, device: torch.device, limit: int | None = None
) -> int:
    """The number of host blocks, given the number of device blocks, and of the settings GiB and the limit in bytes.

    The default is the number of device blocks, limited to a quarter of the memory that is left and to 16 GiB. On a GPU
    they are pinned, so that no other process can use that memory while this one lives. On a CPU they take memory only
    once they are written, that is when the device's blocks do not suffice.

    Raises OutOfMemory, which names the setting.
    """
    left = available_memory(limit) - (num_blocks * block_bytes if device.type == "cpu" else 0)
    if swap_space is None:
        return max(0, min(num_blocks, min(left // 4, _MAX_DEFAULT_SWAP) // block_bytes))
    wanted = int(swap_space * _GIB)
    if wanted > left:
        raise OutOfMemory(
            f"QUIRE_SWAP_SPACE is {swap_space:g} GiB, but only {max(0, left) / _GIB:.2f} GiB of memory are left"
        )
    if swap_space > 0 and wanted < block_bytes:
        raise OutOfMemory(
            f"QUIRE_SWAP_SPACE is {swap_space:g} GiB, less than one block of {block_bytes} bytes; use 0 for none"
        )
    return wanted // block_bytes


def check_swap_space(swap_space: float | None, limit: int | None = None) -> None:
    """Raises OutOfMemory if the settings ask for more GiB than are free, before anything is allocated."""
    free = available_memory(limit) / _GIB
    if swap_space is not None and swap_space > free:
        raise OutOfMemory(f"QUIRE_SWAP_SPACE is {swap_space:g} GiB, but only {free:.2f} GiB of memory are free")


def check_num_blocks(num_blocks: int, block_bytes: int, device: torch.device, limit: int | None = None) -> None:
    """Raises OutOfMemory if the machine has no room for the number of blocks in the settings."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory(limit)
    if num_blocks * block_bytes > free:
        raise OutOfMemory(
            f"QUIRE_NUM_BLOCKS is {num_blocks}, which takes {num_blocks * block_bytes / _GIB:.2f} GiB, but only "
            f"{free / _GIB:.2f} GiB of memory are free"
        )


def _share_of_host(budget: MemoryBudget, profile: Callable[[], object]) -> int:
    fraction = budget.fraction or 0.4
    # What such a step keeps is a small part of the other half. To run it takes seconds, for which a worker that
    # replaces another one keeps streams waiting.
    if budget.has_usual_steps and budget.cpu_bytes <= fraction * available_memory(budget.limit) / 2:
        return budget.cpu_bytes
    kept = profile()
    memory = min(budget.cpu_bytes, int(fraction * available_memory(budget.limit)))
    del kept
    return memory


def _free_on_gpu(budget: MemoryBudget, device: torch.device, profile: Callable[[], object]) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    kept = profile()
    torch.cuda.synchronize(device)
    # Captured graphs reserve memory that counts as allocated only during the capture.
    peak = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    # Held by the driver, by kernels' own workspaces, by graphs themselves, and by other processes.
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    del kept
    gc.collect()
    torch.cuda.empty_cache()
    return int(total * (budget.fraction or 0.9)) - elsewhere - peak
