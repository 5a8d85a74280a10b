"""One tier of KV memory, on the device or on the host: its blocks, and the prefix index over them."""

from collections.abc import Iterable, Mapping

from scheduler_svc.core.kv.block_pool import BlockCounts, BlockPool
from scheduler_svc.core.kv.prefix_index import BlockContent, PrefixIndex
from scheduler_svc.core.step import BlockHash


class BlockTier:
    """A block pool and its prefix index. A block stays in the index until it is allocated again."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(block_size)
        self._new_hashes: list[BlockHash] = []

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in each state."""
        return self.pool.counts

    def allocate(self, count: int) -> list[int] | None:
        """Allocates `count` blocks, which leave the index; None if there are too few."""
        taken = self.pool.allocate(count)
        if taken is None:
            return None
        block_ids, evicted = taken
        self.index.forget(evicted)
        return block_ids

    def publish(self, block_id: int, content: BlockContent) -> int:
        """Adds a block to the index; returns the block that the index has for the hash, which may be another one."""
        known = self.index.publish(block_id, content)
        if known == block_id:
            self._new_hashes.append((block_id, content.hash))
        return known

    def take_new_hashes(self) -> list[BlockHash]:
        """The blocks published since the last call. The worker needs them before it writes to any of them again."""
        hashes, self._new_hashes = self._new_hashes, []
        return hashes

    def restore_cached_blocks(self, found: dict[int, BlockContent]) -> None:
        """Adds free blocks that the worker still holds to the index. The last one is evicted first."""
        self.pool.restore_cached_blocks(list(found))
        for block_id, content in found.items():
            self.index.publish(block_id, content)

    def free_cached(self, most: int | None = None) -> int:
        """Frees all cached blocks, or at most so many, which leave the index; returns how many. Blocks with owners or
        pins stay in it.
        """
        block_ids = self.pool.free_cached(most)
        self.index.forget(block_ids)
        return len(block_ids)

    def forget(self, contents: Iterable[BlockContent]) -> None:
        """Removes these contents from the index. Their blocks become free where nothing owns or pins them."""
        found = {block_id for content in contents if (block_id := self.index.find(content)) is not None}
        self.index.forget(list(found))
        self.pool.free_if_cached(found)
        self._new_hashes = [one for one in self._new_hashes if one[0] not in found]

    def release(self, block_ids: list[int]) -> None:
        """Removes an owner from each block."""
        self.pool.release(block_ids, keep=self.index)

    def unpin(self, block_ids: Iterable[int], *, evict_first: bool = False) -> None:
        """A copy that named these blocks is done. With `evict_first` others of their segment stay longer."""
        self.pool.unpin(block_ids, keep=self.index, evict_first=evict_first)

    def check_integrity(self, owners: Mapping[int, int], pins: Mapping[int, int]) -> None:
        """Raises AssertionError unless pool and index agree with each other and with the owners and pins given."""
        self.pool.check_integrity(owners, pins)
        indexed = self.index.block_ids
        assert indexed >= set(self.pool.eviction_order), "a cached block is not in the index"
        assert not any(map(self.pool.is_free, indexed)), "a free block is in the index"
