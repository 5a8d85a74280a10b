"""Copies whole blocks: between the device's cache and host memory, and within the cache."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from quire_kernels.block_swap import swap_in, swap_out
from worker_svc.page_release import release_blocks
from worker_svc.step import BlockPairs, Direction, SwapResult

logger = logging.getLogger("quire.worker")

# Between two sleeps of a rate-limited copy: other copies may run, and it can be cancelled.
_CHUNK_SECONDS = 0.01


class BlockCopier(Protocol):
    """Copies blocks in the order of its calls. For the thread that launches steps.

    The pairs name existing blocks. No block is the destination of two pairs; of copies within the device, none is both
    source and destination.
    """

    is_synchronous: bool
    """Whether a step computes only after its swaps are done; otherwise they run at the same time."""

    def swap(self, step_id: int, direction: Direction, pairs: BlockPairs) -> "Future[SwapResult]":
        """Starts copying blocks between the tiers, after all writes of earlier launches.

        An error is the swap's failure. Only torch.AcceleratorError is raised, by the future.
        """

    def copy(self, pairs: BlockPairs) -> "Future[None]":
        """Starts copying blocks of the device, before all reads of later launches. The future raises errors."""

    def discard(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Returns the memory of existing blocks to the system, if it can be, before anything that is launched later.

        Nothing that was launched earlier and is not done names them.
        """

    def cancel_all(self) -> None:
        """Cancels what is not done. Returns when nothing is copied any more."""


class RateLimiter:
    """Limits copies to a number of bytes per second; None: no limit."""

    def __init__(self, bytes_per_second: float | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._rate, self._sleep = bytes_per_second, sleep

    def chunks(self, pairs: BlockPairs, block_bytes: int) -> Iterator[BlockPairs]:
        """The pairs in chunks. The caller copies each chunk as it comes; the generator then sleeps as the rate
        requires.
        """
        if self._rate is None:
            yield pairs
            return
        size = max(1, int(self._rate * _CHUNK_SECONDS / block_bytes))
        due = time.perf_counter()
        for start in range(0, len(pairs), size):
            chunk = pairs[start : start + size]
            yield chunk
            due += len(chunk) * block_bytes / self._rate
            self._sleep(max(0.0, due - time.perf_counter()))


def timed_swap(step_id: int, direction: Direction, pairs: BlockPairs, copy_blocks: Callable[[], float]) -> SwapResult:
    """The result of swapping `pairs` with `copy_blocks`, which returns the seconds that the copy took."""
    try:
        return SwapResult(step_id, direction, len(pairs), copy_blocks())
    except torch.AcceleratorError:
        raise  # the device is lost, and every step with it
    except Exception as error:
        logger.exception("swap failed", extra={"step_id": step_id, "direction": direction.value})
        return SwapResult(step_id, direction, len(pairs), 0.0, f"{type(error).__name__}: {error}")


class HostBlockCopier:
    """For two tiers in host memory: plain copies on the thread that computes.

    A swap is done before anything that is launched after it begins, rate limit or not.
    """

    is_synchronous = True

    def __init__(
        self,
        blocks: Tensor,
        host_blocks: Tensor,
        submit: Callable[[Callable[[], Any]], "Future[Any]"],
        rate_limiter: RateLimiter,
    ) -> None:
        """Both are uint8 [num_blocks, block_bytes]; `submit` is the executor's."""
        self._blocks, self._host_blocks, self._submit, self._rate_limiter = blocks, host_blocks, submit, rate_limiter

    def swap(self, step_id: int, direction: Direction, pairs: BlockPairs) -> "Future[SwapResult]":
        future: Future[SwapResult] = self._submit(
            lambda: timed_swap(step_id, direction, pairs, lambda: self._copy_blocks(direction, pairs))
        )
        return future

    def copy(self, pairs: BlockPairs) -> "Future[None]":
        # Both are in one memory, so the swap's copy serves.
        future: Future[None] = self._submit(lambda: swap_out(self._blocks, self._blocks, pairs))
        return future

    def discard(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Where steps are computed, so that later ones write the blocks after it."""

        def release() -> None:
            release_blocks(self._blocks, block_ids)
            release_blocks(self._host_blocks, host_block_ids)

        self._submit(release)

    def cancel_all(self) -> None:
        """Nothing is left at this point: a step is finished after its swaps."""
        self._submit(lambda: None).result()

    def _copy_blocks(self, direction: Direction, pairs: BlockPairs) -> float:
        started = time.perf_counter()
        for chunk in self._rate_limiter.chunks(pairs, self._blocks.shape[1]):
            swap_blocks(direction, self._blocks, self._host_blocks, chunk)
        return time.perf_counter() - started


def swap_blocks(
    direction: Direction, blocks: Tensor, host_blocks: Tensor, pairs: BlockPairs, staging: Tensor | None = None
) -> None:
    """Copies (source, destination) blocks between the tiers, uint8 [num_blocks, block_bytes] each."""
    if direction is Direction.OUT:
        swap_out(blocks, host_blocks, pairs, staging)
    else:
        swap_in(blocks, host_blocks, [(destination, source) for source, destination in pairs], staging)
