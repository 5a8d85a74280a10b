"""The swaps of a runner: checks the blocks that a step names, and reports each swap once, when it is done."""

from collections import Counter, deque
from collections.abc import Sequence as Items
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_svc.block_copier import BlockCopier
from worker_svc.description import WorkerLimits
from worker_svc.sequences import InvalidSequence
from worker_svc.step import BlockOps, BlockPairs, Direction, SwapResult


class SwapTracker:
    """The swaps of one generation of steps. For the runner's thread."""

    def __init__(self, block_copier: BlockCopier, limits: WorkerLimits) -> None:
        self._block_copier = block_copier
        self._num_blocks = {Direction.OUT: limits.num_blocks, Direction.IN: limits.num_host_blocks}
        # In the order of their steps.
        self._pending: deque[tuple[int, Future[SwapResult]]] = deque()
        # Destinations of copies that were left out; their contents are invalid.
        self._invalid_blocks: set[int] = set()

    @property
    def pending(self) -> "list[Future[SwapResult]]":
        """Swaps that have not been reported yet."""
        return [future for _, future in self._pending]

    def start(self, step_id: int, block_ops: BlockOps) -> "list[Future[Any]]":
        """Starts a step's swaps and copies. The returned futures must be done before the step is; their errors are the
        step's.

        A swap that names a block that does not exist fails as a whole. Of copies, only the invalid one is left out; the
        sequences that need it fail.
        """
        self._swap(step_id, Direction.OUT, block_ops.swap_out)
        self._swap(step_id, Direction.IN, block_ops.swap_in)
        if not block_ops.copies:
            return []
        good = self._valid_copies(block_ops.copies)
        filled = {destination for _, destination in good}
        self._invalid_blocks = (self._invalid_blocks - filled) | (
            {destination for _, destination in block_ops.copies} - filled
        )
        return [self._block_copier.copy(good)] if good else []

    def pop_done(self, step_id: int) -> list[SwapResult]:
        """The swaps of steps up to this one that are done and were not reported. Raises if the device is lost."""
        reported, left = [], deque[tuple[int, Future[SwapResult]]]()
        for start_step_id, future in self._pending:
            if start_step_id <= step_id and future.done():
                reported.append(future.result())
            else:
                left.append((start_step_id, future))
        self._pending = left
        return reported

    def stall_seconds(self, step_id: int, reported: Items[SwapResult]) -> float:
        """The part of this step's time that its own swaps took, of those that it reports."""
        if not self._block_copier.is_synchronous:
            return 0.0
        return sum(swap_result.seconds for swap_result in reported if swap_result.step_id == step_id)

    def discard(self, block_ids: Items[int], host_block_ids: Items[int]) -> None:
        """Returns the memory of blocks to the system. Those that do not exist are left out."""
        if block_ids or host_block_ids:
            num_blocks, num_host_blocks = self._num_blocks[Direction.OUT], self._num_blocks[Direction.IN]
            self._block_copier.discard(
                [block for block in block_ids if block < num_blocks],
                [block for block in host_block_ids if block < num_host_blocks],
            )

    @property
    def has_invalid_blocks(self) -> bool:
        """Whether blocks exist whose copy was left out."""
        return bool(self._invalid_blocks)

    def check_copied(self, *tables: Items[int] | NDArray[np.int32]) -> None:
        """Raises InvalidSequence, once, if the copy into one of these blocks was left out."""
        named = {int(block) for table in tables for block in table} & self._invalid_blocks
        self._invalid_blocks -= named
        if named:
            raise InvalidSequence("a copy into one of its blocks names a block that does not exist, or a block twice")

    def cancel_all(self) -> None:
        """Cancels what is not done and forgets all."""
        self._block_copier.cancel_all()
        self._pending.clear()
        self._invalid_blocks.clear()

    def _swap(self, step_id: int, direction: Direction, pairs: BlockPairs) -> None:
        if not pairs:
            return
        reject_reason = self._reject_reason(direction, pairs)
        if reject_reason is None:
            if direction is Direction.IN:
                self._invalid_blocks -= {destination for _, destination in pairs}
            future = self._block_copier.swap(step_id, direction, pairs)
        else:
            future = Future()
            future.set_result(SwapResult(step_id, direction, len(pairs), 0.0, reject_reason))
        self._pending.append((step_id, future))

    def _reject_reason(self, direction: Direction, pairs: BlockPairs) -> str | None:
        back = Direction.IN if direction is Direction.OUT else Direction.OUT
        sources, destinations = self._num_blocks[direction], self._num_blocks[back]
        if any(source >= sources or destination >= destinations for source, destination in pairs):
            device, host = self._num_blocks[Direction.OUT], self._num_blocks[Direction.IN]
            return f"it names a block beyond the {device} of the device or the {host} of the host"
        if len({destination for _, destination in pairs}) < len(pairs):
            return "it names a destination twice"
        return None

    def _valid_copies(self, copies: BlockPairs) -> BlockPairs:
        end = self._num_blocks[Direction.OUT]
        sources = {source for source, _ in copies}
        times = Counter(destination for _, destination in copies)
        return [
            (source, destination)
            for source, destination in copies
            if source < end and destination < end and times[destination] == 1 and destination not in sources
        ]
