"""Copies blocks while steps run on a GPU: swaps have a stream of their own, for which the computing stream never
waits.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from quire_kernels.block_copy import block_copy
from worker_svc.block_copier import RateLimiter, swap_blocks, timed_swap
from worker_svc.executor import run_inline
from worker_svc.step import BlockPairs, Direction, SwapResult

# Device buffer in which scattered blocks are gathered: so large that a copy over PCIe or NVLink takes much longer than
# its start.
_STAGING_BYTES = 16 * 2**20


class CopyStream(Protocol):
    """A stream besides the one that computes."""

    def record_event(self) -> Any:
        """An event at the current end of the computing stream. For the thread that launches steps."""

    def run(self, work: Callable[[], None], after: Any) -> float:
        """Enqueues work here after an event, if there is one, and sleeps until it is done. Returns its seconds."""


class CudaCopyStream:
    """A stream of a CUDA device. `run` is for one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    @torch.inference_mode()
    def run(self, work: Callable[[], None], after: torch.cuda.Event | None) -> float:
        """Times are the device's own."""
        started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            started.record()
            try:
                work()
            finally:
                # What was enqueued before an error is finished before the error is raised.
                ended.record()
                ended.synchronize()
        milliseconds: float = started.elapsed_time(ended)
        return milliseconds / 1e3


class StreamBlockCopier:
    """A `BlockCopier` for a GPU: swaps run one after another on a side stream; a thread waits for them.

    A swap out begins after the steps launched before it, whose writes it reads. A swap in waits for no step: no step in
    flight names a block that it fills. One stream keeps the order of the requests; in return, the two directions do not
    run at once.
    """

    is_synchronous = False

    def __init__(self, blocks: Tensor, host_blocks: Tensor, stream: CopyStream, rate_limiter: RateLimiter) -> None:
        """Both are uint8 [num_blocks, block_bytes], `host_blocks` pinned."""
        self._blocks, self._host_blocks, self._stream, self._rate_limiter = blocks, host_blocks, stream, rate_limiter
        num_staged = max(1, _STAGING_BYTES // blocks.shape[1])
        self._staging = torch.empty((num_staged, blocks.shape[1]), dtype=torch.uint8, device=blocks.device)
        self._thread = ThreadPoolExecutor(1, "swaps")
        # Set while unfinished swaps are to be cancelled.
        self._cancelling = threading.Event()

    def swap(self, step_id: int, direction: Direction, pairs: BlockPairs) -> "Future[SwapResult]":
        after = self._stream.record_event() if direction is Direction.OUT else None

        def copy_blocks() -> float:
            return self._stream.run(lambda: self._enqueue(direction, pairs), after)

        return self._thread.submit(timed_swap, step_id, direction, pairs, copy_blocks)

    def copy(self, pairs: BlockPairs) -> "Future[None]":
        """In the computing stream, so that nothing needs to wait."""
        device = self._blocks.device
        placed = torch.tensor(pairs, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        return run_inline(lambda: block_copy(self._blocks, self._blocks, placed))

    def discard(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Both tiers are allocations that are returned as a whole."""

    def cancel_all(self) -> None:
        self._cancelling.set()
        self._thread.submit(lambda: None).result()
        self._cancelling.clear()

    def _enqueue(self, direction: Direction, pairs: BlockPairs) -> None:
        for chunk in self._rate_limiter.chunks(pairs, self._blocks.shape[1]):
            if self._cancelling.is_set():
                return  # a cancelled swap has no result
            swap_blocks(direction, self._blocks, self._host_blocks, chunk, self._staging)
