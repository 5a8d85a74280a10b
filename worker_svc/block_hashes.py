"""What blocks hold, by the labels that schedulers gave them: what outlives a scheduler that dies."""

from collections.abc import Iterable
from dataclasses import dataclass

from worker_svc.step import BlockHashes, BlockOps


@dataclass(frozen=True, slots=True)
class BlockHashReport:
    """The labels of blocks that still hold what these say."""

    device: BlockHashes
    host: BlockHashes


class BlockHashTable:
    """The labels of both tiers, from one generation of steps to the next. For the runner's thread.

    A label is given once its block is filled, and goes before the block is written again: a write that fails halfway
    leaves none behind.
    """

    def __init__(self) -> None:
        self._device: dict[int, bytes] = {}
        self._host: dict[int, bytes] = {}

    def update(self, device: BlockHashes, host: BlockHashes) -> None:
        """These blocks hold what their labels say from now on."""
        self._device.update(device)
        self._host.update(host)

    def invalidate_copied(self, block_ops: BlockOps) -> None:
        """A step's moves are about to be made."""
        self.invalidate_written(block for pairs in (block_ops.swap_in, block_ops.copies) for _, block in pairs)
        for _, block in block_ops.swap_out:
            self._host.pop(block, None)

    def invalidate_written(self, block_ids: Iterable[int]) -> None:
        """These blocks of the device are about to be written."""
        for block in block_ids:
            self._device.pop(block, None)

    def report(self) -> BlockHashReport:
        """All labels there are, as values of their own."""
        return BlockHashReport(list(self._device.items()), list(self._host.items()))
