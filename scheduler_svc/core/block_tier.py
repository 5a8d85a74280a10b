"""A tier of memory for keys and values, on the device or on its host: its blocks, and which can be found again."""

from collections.abc import Iterable, Mapping

from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.plan import BlockHash
from scheduler_svc.core.prefix import BlockContent, PrefixIndex


class BlockTier:
    """A block pool and the prefix index over it, kept in step: a block can be found until it is allocated anew."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(block_size)
        self._new_hashes: list[BlockHash] = []

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, of which nothing can be found any more. None where there are too few."""
        taken = self.pool.allocate(count)
        if taken is None:
            return None
        block_ids, evicted = taken
        self.index.forget(evicted)
        return block_ids

    def publish(self, block_id: int, content: BlockContent) -> int:
        """Say that a block holds this; returns the block that is found for it from now on, which may be another one."""
        known = self.index.publish(block_id, content)
        if known == block_id:
            self._new_hashes.append((block_id, content.hash))
        return known

    def take_new_hashes(self) -> list[BlockHash]:
        """What was published since this was asked last: for the worker, before it writes any of these blocks again."""
        hashes, self._new_hashes = self._new_hashes, []
        return hashes

    def restore_cached_blocks(self, found: dict[int, BlockContent]) -> None:
        """Free blocks hold this, as their worker knows already: they can be found. The last one is given up first."""
        self.pool.restore_cached_blocks(list(found))
        for block_id, content in found.items():
            self.index.publish(block_id, content)

    def release(self, block_ids: list[int]) -> None:
        """Take an owner off each block."""
        self.pool.release(block_ids, keep=self.index)

    def unpin(self, block_ids: Iterable[int], *, first_to_go: bool = False) -> None:
        """A copy that named these blocks is done. What is cached by that may be the first to be given up."""
        self.pool.unpin(block_ids, keep=self.index, first_to_go=first_to_go)

    def check_integrity(self, owners: Mapping[int, int], pins: Mapping[int, int]) -> None:
        """Raise AssertionError unless pool and index agree with each other and with the owners and pins given."""
        self.pool.check_integrity(owners, pins)
        for block_id in range(self.pool.num_blocks):
            if self.pool.is_cached(block_id):
                assert block_id in self.index, "a cached block cannot be found"
            elif self.pool.is_free(block_id):
                assert block_id not in self.index, "a free block can be found"
