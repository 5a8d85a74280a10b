"""The block pool: which block of a replica's device memory is free, cached or used, and by how many."""

from collections import OrderedDict, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in each state; they add up to the pool's size."""

    free: int
    cached: int
    used: int
    in_flight: int


class BlockPool:
    """Hands out block ids 0 to num_blocks - 1.

    A block is *free*; or *used*, by as many owners as its reference count says; or *cached*: without an owner, but its
    contents are known to the prefix index and may be taken up again until the block is needed. The oldest goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in each state."""
        used = self.num_blocks - self.num_available
        return BlockCounts(free=len(self._free), cached=len(self._cached), used=used, in_flight=0)

    def ref_count(self, block_id: int) -> int:
        """How many owners a block has."""
        return self._ref_counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether a block has no owner but keeps its contents."""
        return block_id in self._cached

    def allocate(self, count: int) -> tuple[list[int], list[int]] | None:
        """Take `count` blocks, each with one owner.

        Returns the blocks, and which of them were evicted from the cache for it; None where there are too few.
        """
        if count > self.num_available:
            return None
        num_free = min(count, len(self._free))
        block_ids = [self._free.popleft() for _ in range(num_free)]
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count - num_free)]
        block_ids += evicted
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids, evicted

    def share(self, block_ids: list[int]) -> None:
        """Add an owner to blocks that are used or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: list[int], keep: set[int]) -> None:
        """Take an owner off each block. What has none left is cached if it is in `keep`, else free.

        The last block is let go first, so that of a cached prefix the tail is evicted before the head.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if block_id in keep:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def check_integrity(self, ref_counts: dict[int, int]) -> None:
        """Raise AssertionError unless every block is in one state and its owners are those that are given."""
        free, cached = set(self._free), set(self._cached)
        used = {block_id for block_id, count in enumerate(self._ref_counts) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(cached), "a block is free and cached"
        assert used.isdisjoint(free | cached), "a used block is free or cached"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is in no state"
        assert {block_id: self._ref_counts[block_id] for block_id in used} == ref_counts, "owners do not add up"
