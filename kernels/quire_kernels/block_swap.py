"""Copies blocks between the device's KV cache and host memory, in as few and as large copies as possible.

A block is contiguous over all layers, so a copy of one block has a useful size. Blocks that are neighbours on both
sides are one copy. Blocks that are neighbours on the host only pass through a staging buffer, where there is one:
gathering them uses the device's own bandwidth, not that of the link to the host, and saves the launch of a copy each.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import check_blocks, check_same_blocks

BlockPairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class HostRun:
    """Neighbours on the host, from `host_start` on, and the device block of each."""

    host_start: int
    device_blocks: tuple[int, ...]

    @property
    def host(self) -> slice:
        return slice(self.host_start, self.host_start + len(self.device_blocks))

    def pieces(self, size: int) -> list["HostRun"]:
        """The run in pieces of at most `size` blocks."""
        starts = range(0, len(self.device_blocks), size)
        return [HostRun(self.host_start + start, self.device_blocks[start : start + size]) for start in starts]

    def device_runs(self) -> list["HostRun"]:
        """The run in pieces that are neighbours on the device too."""
        blocks = self.device_blocks
        breaks = [place for place in range(1, len(blocks)) if blocks[place] != blocks[place - 1] + 1]
        edges = zip([0, *breaks], [*breaks, len(blocks)], strict=True)
        return [HostRun(self.host_start + start, blocks[start:end]) for start, end in edges]


def host_runs(pairs: BlockPairs) -> list[HostRun]:
    """Pairs (device block, host block), in any order, as runs that are contiguous on the host."""
    runs: list[tuple[int, list[int]]] = []
    for device_block, host_block in sorted(pairs, key=lambda pair: pair[1]):
        if runs and host_block == runs[-1][0] + len(runs[-1][1]):
            runs[-1][1].append(device_block)
        else:
            runs.append((host_block, [device_block]))
    return [HostRun(start, tuple(blocks)) for start, blocks in runs]


def swap_out(
    cache: Tensor,
    host_cache: Tensor,
    pairs: BlockPairs,
    staging: Tensor | None = None,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copies blocks of the device's cache to the host.

    Returns before the copies are done; they run in the stream's order, so record an event behind them. Until then
    neither tier's blocks may be written.

    Args:
        cache: [num_blocks, ...], contiguous, on any device.
        host_cache: [num_host_blocks, ...], contiguous, of the cache's block shape and dtype, in host memory, pinned
            where the cache is on a GPU.
        pairs: (device block, host block) in any order, none of them the destination of two.
        staging: [num_staged, ...], contiguous, of the cache's block shape, dtype and device; used in `stream` alone.
            None: blocks that are scattered on the device are copied one by one.
        stream: where the copies run; None: the current one. Ignored without a GPU.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device, or a pair names no block.
    """
    _check(cache, host_cache, pairs, staging)
    _check_once([host_block for _, host_block in pairs])
    with _on(stream):
        for run in host_runs(pairs):
            device_runs = run.device_runs()
            if staging is None or len(device_runs) == 1:
                for part in device_runs:
                    host_cache[part.host].copy_(cache[_device_slice(part)], non_blocking=True)
                continue
            for part in run.pieces(len(staging)):
                _gather(cache, staging, part)
                host_cache[part.host].copy_(staging[: len(part.device_blocks)], non_blocking=True)


def swap_in(
    cache: Tensor,
    host_cache: Tensor,
    pairs: BlockPairs,
    staging: Tensor | None = None,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copies blocks of the host to the device's cache. Arguments, errors and order are those of `swap_out`."""
    _check(cache, host_cache, pairs, staging)
    _check_once([device_block for device_block, _ in pairs])
    with _on(stream):
        for run in host_runs(pairs):
            device_runs = run.device_runs()
            if staging is None or len(device_runs) == 1:
                for part in device_runs:
                    cache[_device_slice(part)].copy_(host_cache[part.host], non_blocking=True)
                continue
            for part in run.pieces(len(staging)):
                staging[: len(part.device_blocks)].copy_(host_cache[part.host], non_blocking=True)
                _scatter(staging, cache, part)


def swap_out_reference(
    cache: Tensor,
    host_cache: Tensor,
    pairs: BlockPairs,
    staging: Tensor | None = None,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """`swap_out` block by block."""
    for device_block, host_block in pairs:
        host_cache[host_block] = cache[device_block]


def swap_in_reference(
    cache: Tensor,
    host_cache: Tensor,
    pairs: BlockPairs,
    staging: Tensor | None = None,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """`swap_in` block by block."""
    for device_block, host_block in pairs:
        cache[device_block] = host_cache[host_block]


def _device_slice(run: HostRun) -> slice:
    return slice(run.device_blocks[0], run.device_blocks[0] + len(run.device_blocks))


def _gather(cache: Tensor, staging: Tensor, run: HostRun) -> None:
    # Imported here: swaps on a CPU need no Triton.
    from quire_kernels.block_copy import block_copy

    pairs = [(block, place) for place, block in enumerate(run.device_blocks)]
    block_copy(cache, staging, _pairs_on(cache.device, pairs))


def _scatter(staging: Tensor, cache: Tensor, run: HostRun) -> None:
    from quire_kernels.block_copy import block_copy

    block_copy(staging, cache, _pairs_on(cache.device, list(enumerate(run.device_blocks))))


def _pairs_on(device: torch.device, pairs: list[tuple[int, int]]) -> Tensor:
    """int64 [num_pairs, 2]; pinned first, since a copy from pageable memory would wait for the stream."""
    return torch.tensor(pairs, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _check(cache: Tensor, host_cache: Tensor, pairs: BlockPairs, staging: Tensor | None) -> None:
    check_blocks(cache, "cache")
    check_blocks(host_cache, "host_cache")
    check_same_blocks(host_cache, cache, "host_cache", "cache")
    require(host_cache.device.type == "cpu", "host_cache", "be in host memory")
    require(cache.device.type == "cpu" or host_cache.is_pinned(), "host_cache", "be pinned")
    if staging is not None:
        check_blocks(staging, "staging")
        check_same_blocks(staging, cache, "staging", "cache")
        require(staging.device == cache.device, "staging", "be on the device of cache")
        require(len(staging) > 0, "staging", "hold at least one block")
    # A slice beyond the end would be short without an error.
    for side, blocks in enumerate((cache, host_cache)):
        named = [pair[side] for pair in pairs]
        require(all(0 <= block < len(blocks) for block in named), "pairs", "name blocks that there are")


def _check_once(destinations: list[int]) -> None:
    require(len(set(destinations)) == len(destinations), "pairs", "name each destination once")
