"""Moves whole blocks: between the device's cache and host memory, and within the cache."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from quire_kernels.block_swap import swap_in, swap_out
from worker_svc.cache import KVCache
from worker_svc.executor import Executor
from worker_svc.step import BlockPairs, Direction, SwapResult

logger = logging.getLogger("quire.worker")

# Between two waits of a copy that is held back: others get at the bus, and it can be given up.
_CHUNK_SECONDS = 0.01


class BlockCopier(Protocol):
    """Has blocks copied, in the order in which it is asked. For the thread that launches steps.

    The pairs name blocks that there are, none of them as the destination of two; of copies, none at both ends.
    """

    is_synchronous: bool
    """Whether a step computes only once its transfers are done; else they go on beside it."""

    def swap(self, step_id: int, direction: Direction, pairs: BlockPairs) -> "Future[SwapResult]":
        """Begin to copy blocks between the tiers, behind all that earlier launches write.

        What goes wrong is the transfer's failure; only torch.AcceleratorError is raised, by the future.
        """

    def copy(self, pairs: BlockPairs) -> "Future[None]":
        """Begin to copy blocks of the device, ahead of all that later launches read. The future raises what goes
        wrong."""

    def cancel_all(self) -> None:
        """Give up what is not done. Returns when nothing is copied any more."""


class RateLimiter:
    """Holds copies back to so many bytes per second; None lets them run."""

    def __init__(self, bytes_per_second: float | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._rate, self._sleep = bytes_per_second, sleep

    def chunks(self, pairs: BlockPairs, block_bytes: int) -> Iterator[BlockPairs]:
        """The pairs, in pieces to be copied as they come: each is followed by the time that it may take."""
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


def make_block_copier(
    executor: Executor, cache: KVCache, host_blocks: Tensor, rate_limiter: RateLimiter
) -> BlockCopier:
    """What moves blocks of the cache that an executor computes over, and blocks of the host.

    `host_blocks` are uint8 [num_host_blocks, block_bytes], pinned where the cache is on a GPU.
    """
    if cache.device.type != "cuda":
        return HostBlockCopier(cache.blocks, host_blocks, executor.submit, rate_limiter)
    # Brings in Triton, which a processor does not need.
    from worker_svc.gpu.block_copier import CudaCopyStream, StreamBlockCopier

    return StreamBlockCopier(cache.blocks, host_blocks, CudaCopyStream(cache.device), rate_limiter)


def timed_swap(step_id: int, direction: Direction, pairs: BlockPairs, copy_blocks: Callable[[], float]) -> SwapResult:
    """The transfer of pairs that `move` copies, which returns how many seconds it took."""
    try:
        return SwapResult(step_id, direction, len(pairs), copy_blocks())
    except torch.AcceleratorError:
        raise  # the device is gone, and every step with it
    except Exception as error:
        logger.exception("a swap could not be done", extra={"step_id": step_id, "direction": direction.value})
        return SwapResult(step_id, direction, len(pairs), 0.0, f"{type(error).__name__}: {error}")


class HostBlockCopier:
    """Where both tiers are memory of the host: plain copies, on the thread that computes.

    A transfer is done before anything that is launched after it begins, held back or not.
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
        """As `BlockCopier` has it."""
        future: Future[SwapResult] = self._submit(
            lambda: timed_swap(step_id, direction, pairs, lambda: self._copy_blocks(direction, pairs))
        )
        return future

    def copy(self, pairs: BlockPairs) -> "Future[None]":
        """As `BlockCopier` has it."""
        # Of two places in one memory, either can play the host.
        future: Future[None] = self._submit(lambda: swap_out(self._blocks, self._blocks, pairs))
        return future

    def cancel_all(self) -> None:
        """As `BlockCopier` has it. Nothing is left by then: each step is finished behind its transfers."""
        self._submit(lambda: None).result()

    def _copy_blocks(self, direction: Direction, pairs: BlockPairs) -> float:
        started = time.perf_counter()
        for chunk in self._rate_limiter.chunks(pairs, self._blocks.shape[1]):
            swap_blocks(direction, self._blocks, self._host_blocks, chunk)
        return time.perf_counter() - started


def swap_blocks(
    direction: Direction, blocks: Tensor, host_blocks: Tensor, pairs: BlockPairs, staging: Tensor | None = None
) -> None:
    """Copy (source, destination) blocks between the tiers, uint8 [num_blocks, block_bytes] each."""
    if direction is Direction.OUT:
        swap_out(blocks, host_blocks, pairs, staging)
    else:
        swap_in(blocks, host_blocks, [(destination, source) for source, destination in pairs], staging)
