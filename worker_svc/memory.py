"""How many blocks there are: on the device, measured by a run of the largest step, and in the host's memory."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_svc.errors import StartupFailed
from worker_svc.host import available_memory

_GIB = 2**30
_MAX_DEFAULT_SWAP = 16 * _GIB


class OutOfMemory(StartupFailed):
    """What is wanted, or one block at least, does not fit. The text is for the operator."""


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


def count_host_blocks(block_bytes: int, num_blocks: int, swap_space: float | None, device: torch.device) -> int:
    """How many blocks go into the host's memory, given how many the device has, and the GiB that the settings want.

    Without these: as many as the device has, as far as they take no more than a quarter of the memory that is left,
    which others want too, and 16 GiB: on a GPU they are pinned, so that no other process gets at them as long as this
    one lives. On a processor the host's blocks take memory only once they are written, where the others do not
    suffice; so they are worth having there too, though more of the others would be worth more.

    Raises OutOfMemory, which names the setting.
    """
    left = available_memory() - (num_blocks * block_bytes if device.type == "cpu" else 0)
    if swap_space is None:
        return max(0, min(num_blocks, min(left // 4, _MAX_DEFAULT_SWAP) // block_bytes))
    wanted = int(swap_space * _GIB)
    if wanted > left:
        raise OutOfMemory(
            f"QUIRE_SWAP_SPACE is {swap_space:g} GiB, and {max(0, left) / _GIB:.2f} GiB of memory are left"
        )
    if swap_space > 0 and wanted < block_bytes:
        raise OutOfMemory(
            f"QUIRE_SWAP_SPACE is {swap_space:g} GiB, and one block takes {block_bytes} bytes; 0 is for none"
        )
    return wanted // block_bytes


def check_swap_space(swap_space: float | None) -> None:
    """Raises OutOfMemory where the settings want more GiB than are free, before anything has taken of them."""
    free = available_memory() / _GIB
    if swap_space is not None and swap_space > free:
        raise OutOfMemory(f"QUIRE_SWAP_SPACE is {swap_space:g} GiB, and {free:.2f} GiB of memory are free")


def check_num_blocks(num_blocks: int, block_bytes: int, device: torch.device) -> None:
    """Raises OutOfMemory where the machine has no room for as many blocks as the settings want."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if num_blocks * block_bytes > free:
        raise OutOfMemory(
            f"QUIRE_NUM_BLOCKS is {num_blocks}, which takes {num_blocks * block_bytes / _GIB:.2f} GiB, and "
            f"{free / _GIB:.2f} GiB of memory are free"
        )


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
