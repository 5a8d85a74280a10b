"""Hashes of what blocks hold, as schedulers reported them. They outlive a scheduler that dies."""

from collections.abc import Iterable
from dataclasses import dataclass

from worker_svc.step import BlockHashes, BlockOps


@dataclass(frozen=True, slots=True)
class BlockHashReport:
    """Blocks and the hashes of what they hold."""

    device: BlockHashes
    host: BlockHashes


class BlockHashTable:
    """The hashes of both tiers, kept from one generation of steps to the next. For the runner's thread.

    A hash is stored after its block is filled and deleted before the block is written again, so a write that fails
    halfway leaves none.
    """

    def __init__(self) -> None:
        self._device: dict[int, bytes] = {}
        self._host: dict[int, bytes] = {}

    def update(self, device: BlockHashes, host: BlockHashes) -> None:
        """Stores the hashes of these blocks."""
        self._device.update(device)
        self._host.update(host)

    def invalidate_copied(self, block_ops: BlockOps) -> None:
        """Deletes the hashes of the destinations of a step's swaps and copies."""
        self.invalidate_written(block for pairs in (block_ops.swap_in, block_ops.copies) for _, block in pairs)
        for _, block in block_ops.swap_out:
            self._host.pop(block, None)

    def invalidate_written(self, block_ids: Iterable[int]) -> None:
        """Deletes the hashes of these device blocks, which are about to be written."""
        for block in block_ids:
            self._device.pop(block, None)

    def invalidate_discarded(self, device: Iterable[int], host: Iterable[int]) -> None:
        """Deletes the hashes of blocks whose contents are about to be lost."""
        self.invalidate_written(device)
        for block in host:
            self._host.pop(block, None)

    def report(self) -> BlockHashReport:
        """All hashes, copied."""
        return BlockHashReport(list(self._device.items()), list(self._host.items()))
