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
from worker_svc.step import BlockPairs, Direction, Transfer

logger = logging.getLogger("quire.worker")

# Between two waits of a copy that is held back: others get at the bus, and it can be given up.
_PIECE_SECONDS = 0.01


class Mover(Protocol):
    """Has blocks copied, in the order in which it is asked. For the thread that launches steps.

    The pairs name blocks that there are, none of them as the destination of two; of copies, none at both ends.
    """

    holds_up_steps: bool
    """Whether a step computes only once its transfers are done; else they go on beside it."""

    def swap(self, step_id: int, direction: Direction, pairs: BlockPairs) -> "Future[Transfer]":
        """Begin to copy blocks between the tiers, behind all that earlier launches write.

        What goes wrong is the transfer's failure; only torch.AcceleratorError is raised, by the future.
        """

    def copy(self, pairs: BlockPairs) -> "Future[None]":
        """Begin to copy blocks of the device, ahead of all that later launches read. The future raises what goes
        wrong."""

    def drop(self) -> None:
        """Give up what is not done. Returns when nothing is copied any more."""


class Pace:
    """Holds copies back to so many bytes per second; None lets them run."""

    def __init__(self, bytes_per_second: float | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._rate, self._sleep = bytes_per_second, sleep

    def pieces(self, pairs: BlockPairs, block_bytes: int) -> Iterator[BlockPairs]:
        """The pairs, in pieces to be copied as they come: each is followed by the time that it may take."""
        if self._rate is None:
            yield pairs
            return
        size = max(1, int(self._rate * _PIECE_SECONDS / block_bytes))
        due = time.perf_counter()
        for start in range(0, len(pairs), size):
            piece = pairs[start : start + size]
            yield piece
            due += len(piece) * block_bytes / self._rate
            self._sleep(max(0.0, due - time.perf_counter()))


def make_mover(executor: Executor, cache: KVCache, host_blocks: Tensor, pace: Pace) -> Mover:
    """What moves blocks of the cache that an executor computes over, and blocks of the host.

    `host_blocks` are uint8 [num_host_blocks, block_bytes], pinned where the cache is on a GPU.
    """
    if cache.device.type != "cuda":
        return HostMover(cache.blocks, host_blocks, executor.submit, pace)
    # Brings in Triton, which a processor does not need.
    from worker_svc.gpu.mover import CudaSideStream, StreamMover

    return StreamMover(cache.blocks, host_blocks, CudaSideStream(cache.device), pace)


def transferred(step_id: int, direction: Direction, pairs: BlockPairs, move: Callable[[], float]) -> Transfer:
    """The transfer of pairs that `move` copies, which returns how many seconds it took."""
    try:
        return Transfer(step_id, direction, len(pairs), move())
    except torch.AcceleratorError:
        raise  # the device is gone, and every step with it
    except Exception as error:
        logger.exception("a swap could not be done", extra={"step_id": step_id, "direction": direction.value})
        return Transfer(step_id, direction, len(pairs), 0.0, f"{type(error).__name__}: {error}")


class HostMover:
    """Where both tiers are memory of the host: plain copies, on the thread that computes.

    A transfer is done before anything that is launched after it begins, held back or not.
    """

    holds_up_steps = True

    def __init__(
        self, blocks: Tensor, host_blocks: Tensor, submit: Callable[[Callable[[], Any]], "Future[Any]"], pace: Pace
    ) -> None:
        """Both are uint8 [num_blocks, block_bytes]; `submit` is the executor's."""
        self._blocks, self._host_blocks, self._submit, self._pace = blocks, host_blocks, submit, pace

    def swap(self, step_id: int, direction: Direction, pairs: BlockPairs) -> "Future[Transfer]":
        """As `Mover` has it."""
        future: Future[Transfer] = self._submit(
            lambda: transferred(step_id, direction, pairs, lambda: self._move(direction, pairs))
        )
        return future

    def copy(self, pairs: BlockPairs) -> "Future[None]":
        """As `Mover` has it."""
        # Of two places in one memory, either can play the host.
        future: Future[None] = self._submit(lambda: swap_out(self._blocks, self._blocks, pairs))
        return future

    def drop(self) -> None:
        """As `Mover` has it. Nothing is left by then: each step is finished behind its transfers."""
        self._submit(lambda: None).result()

    def _move(self, direction: Direction, pairs: BlockPairs) -> float:
        started = time.perf_counter()
        for piece in self._pace.pieces(pairs, self._blocks.shape[1]):
            move_blocks(direction, self._blocks, self._host_blocks, piece)
        return time.perf_counter() - started


def move_blocks(
    direction: Direction, blocks: Tensor, host_blocks: Tensor, pairs: BlockPairs, staging: Tensor | None = None
) -> None:
    """Copy (source, destination) blocks between the tiers, uint8 [num_blocks, block_bytes] each."""
    if direction is Direction.OUT:
        swap_out(blocks, host_blocks, pairs, staging)
    else:
        swap_in(blocks, host_blocks, [(destination, source) for source, destination in pairs], staging)
