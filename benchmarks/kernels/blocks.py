"""Cases of copies of whole blocks: within the device, to host memory, and back."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase, Run
from benchmarks.kernels.device import Bound
from worker_svc.step import BlockPairs, Direction

# Blocks that are gathered on the device and copied to the host as one
_NUM_STAGED = 64


def copy_blocks(device: torch.device, num_pairs: int, block_bytes: int) -> KernelCase:
    from quire_kernels.block_copy import block_copy

    cache = torch.zeros(2 * num_pairs, block_bytes, dtype=torch.uint8, device=device)
    pairs = torch.randperm(2 * num_pairs, device=device).view(num_pairs, 2)

    def plain() -> object:
        return cache.index_copy_(0, pairs[:, 1], cache[pairs[:, 0]])

    run = partial(block_copy, cache, cache, pairs)
    return KernelCase("block_copy", _shape(num_pairs, block_bytes), Bound.MEMORY, 2 * num_pairs * block_bytes, run,
                {"torch": plain})  # fmt: skip


def swap_blocks(device: torch.device, direction: Direction, num_pairs: int, block_bytes: int) -> KernelCase:
    """Blocks that are scattered on the device and neighbours in host memory, which is pinned for a GPU.

    On a CPU both are host memory, and its copy rate is the bound.
    """
    from quire_kernels.block_swap import swap_in, swap_out

    cache = torch.zeros(2 * num_pairs, block_bytes, dtype=torch.uint8, device=device)
    host = torch.zeros(num_pairs, block_bytes, dtype=torch.uint8)
    on_gpu = device.type == "cuda"
    if on_gpu:
        host = host.pin_memory()
    staging = torch.empty(_NUM_STAGED, block_bytes, dtype=torch.uint8, device=device) if on_gpu else None
    places = torch.randperm(2 * num_pairs)[:num_pairs].tolist()
    pairs: BlockPairs = [(block, place) for place, block in enumerate(places)]
    outwards = direction is Direction.OUT
    run = partial(swap_out if outwards else swap_in, cache, host, pairs, staging)
    if on_gpu:
        bound, amount = Bound.LINK, num_pairs * block_bytes
    else:
        bound, amount = Bound.MEMORY, 2 * num_pairs * block_bytes
    peers = _peers(cache, host, torch.tensor(places, device=device), outwards)
    return KernelCase(run.func.__name__, _shape(num_pairs, block_bytes), bound, amount, run, peers)


def _peers(cache: Tensor, host: Tensor, places: Tensor, outwards: bool) -> dict[str, Run]:
    pairs = list(enumerate(places.tolist()))

    def one_by_one() -> None:
        for place, block in pairs:
            source, destination = (cache[block], host[place]) if outwards else (host[place], cache[block])
            destination.copy_(source, non_blocking=True)

    def by_index() -> None:
        if outwards:
            host.copy_(cache.index_select(0, places), non_blocking=True)
        else:
            cache.index_copy_(0, places, host.to(cache.device, non_blocking=True))

    return {"torch, block by block": one_by_one, "torch, by index": by_index}


def _shape(num_pairs: int, block_bytes: int) -> str:
    return f"{num_pairs} blocks of {block_bytes >> 10} KiB"
