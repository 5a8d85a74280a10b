"""The block pool of one tier of memory: the state of each block, and its number of owners."""

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from scheduler_svc.core.kv.eviction import EvictionOrder


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in each state; they add up to the pool's size."""

    free: int
    cached: int
    used: int
    copying: int


class BlockPool:
    """Hands out block ids 0 to num_blocks - 1.

    A block is *free*; *used*, with as many owners as its reference count says; *copying*: pinned by copies in
    progress, without another owner; or *cached*: without an owner, but in the prefix index, and reusable until it is
    evicted.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._cached = EvictionOrder(protected=num_blocks * 3 // 4)
        self._ref_counts = [0] * num_blocks
        self._pins: Counter[int] = Counter()
        self._found_again = bytearray(num_blocks)
        # Whether a block may take memory: it does when it is written, and what was written before is not known here.
        self._takes_memory = bytearray(b"\1" * num_blocks)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks without an owner and without contents."""
        return len(self._free)

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in each state."""
        copying = sum(self._ref_counts[block_id] == pins for block_id, pins in list(self._pins.items()))
        used = self.num_blocks - self.num_available - copying
        return BlockCounts(free=len(self._free), cached=len(self._cached), used=used, copying=copying)

    @property
    def eviction_order(self) -> Iterator[int]:
        """Cached blocks, in the order of their eviction."""
        return iter(self._cached)

    def num_owners(self, block_id: int) -> int:
        """How many owners a block has, without copies in progress."""
        return self._ref_counts[block_id] - self._pins.get(block_id, 0)

    def was_found_again(self, block_id: int) -> bool:
        """Whether a block's contents were reused since it was filled."""
        return bool(self._found_again[block_id])

    def mark_found_again(self, block_id: int) -> None:
        """Counts a copy as reused, because the block that it was copied from was."""
        self._found_again[block_id] = True

    def is_pinned(self, block_id: int) -> bool:
        """Whether a copy in progress names a block."""
        return block_id in self._pins

    def is_cached(self, block_id: int) -> bool:
        """Whether a block has no owner but is in the prefix index."""
        return block_id in self._cached

    def is_free(self, block_id: int) -> bool:
        """Whether a block has no owner and is not cached."""
        return self._ref_counts[block_id] == 0 and block_id not in self._cached

    def allocate(self, count: int) -> tuple[list[int], list[int]] | None:
        """Allocates `count` blocks, each with one owner.

        Returns the blocks, and those of them that were evicted from the cache; None if there are too few.
        """
        if count > self.num_available:
            return None
        num_free = min(count, len(self._free))
        block_ids = [self._free.popleft() for _ in range(num_free)]
        evicted = [self._cached.pop() for _ in range(count - num_free)]
        block_ids += evicted
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            self._found_again[block_id] = False
            self._takes_memory[block_id] = True
        return block_ids, evicted

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds an owner to blocks, which are used or cached."""
        for block_id in block_ids:
            self._own(block_id)
            self._found_again[block_id] = True

    def release(self, block_ids: list[int], keep: Container[int]) -> None:
        """Removes an owner from each block. A block without owners is cached if it is in `keep`, else free.

        The last block is released first, so that the tail of a cached prefix is evicted before its head.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if block_id in keep:
                    self._cached.add(block_id, found_again=bool(self._found_again[block_id]))
                else:
                    self._free.append(block_id)

    def free_cached(self, most: int | None = None) -> list[int]:
        """Cached blocks become free ones: at most so many, in the order of their eviction. Returns them."""
        count = len(self._cached) if most is None else min(most, len(self._cached))
        block_ids = [self._cached.pop() for _ in range(count)]
        self._free.extend(block_ids)
        return block_ids

    def free_if_cached(self, block_ids: Iterable[int]) -> None:
        """Those of these blocks that are cached become free ones."""
        for block_id in block_ids:
            if block_id in self._cached:
                self._cached.remove(block_id)
                self._free.append(block_id)

    @property
    def has_free_memory(self) -> bool:
        """Whether a free block may take memory."""
        return any(self._takes_memory[block_id] for block_id in self._free)

    def discard_free(self) -> list[int]:
        """The free blocks that may take memory, which they do no more. Each is returned once until it is allocated."""
        block_ids = [block_id for block_id in self._free if self._takes_memory[block_id]]
        for block_id in block_ids:
            self._takes_memory[block_id] = False
        return block_ids

    def restore_cached_blocks(self, block_ids: Seq[int]) -> None:
        """Free blocks become cached ones. The last one is evicted first."""
        taken = set(block_ids)
        self._free = deque(block_id for block_id in self._free if block_id not in taken)
        for block_id in reversed(block_ids):
            self._cached.add(block_id, found_again=False)

    def pin(self, block_ids: Iterable[int]) -> None:
        """A copy names these blocks, which are used or cached."""
        for block_id in block_ids:
            self._own(block_id)
            self._pins[block_id] += 1

    def unpin(self, block_ids: Iterable[int], keep: Container[int], *, evict_first: bool) -> None:
        """A copy is done. A block without owners is cached if it is in `keep`, else free.

        The tail of a prefix is evicted before its head; with `evict_first`, before all other cached
        blocks of its segment.
        """
        for block_id in block_ids if evict_first else reversed(list(block_ids)):
            self._pins[block_id] -= 1
            if not self._pins[block_id]:
                del self._pins[block_id]
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if block_id not in keep:
                    self._free.append(block_id)
                else:
                    add = self._cached.add_oldest if evict_first else self._cached.add
                    add(block_id, found_again=bool(self._found_again[block_id]))

    def _own(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            self._cached.remove(block_id)
        self._ref_counts[block_id] += 1

    def check_integrity(self, owners: Mapping[int, int], pins: Mapping[int, int]) -> None:
        """Raises AssertionError unless every block is in one state and has the given owners and pins."""
        free, cached = set(self._free), set(self._cached)
        num_owned = self.num_blocks - self._ref_counts.count(0)
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(cached), "a block is free and cached"
        assert len(free) + len(cached) + num_owned == self.num_blocks, "a block is in no state, or in two"
        assert dict(self._pins) == pins, "pins do not add up"
        expected = Counter(owners) + Counter(pins)
        ref_counts = {block_id: self._ref_counts[block_id] for block_id in expected}
        assert len(expected) == num_owned, "owners do not add up"
        assert ref_counts == dict(expected), "owners do not add up"
        assert expected.keys().isdisjoint(free), "a used block is free"
        assert expected.keys().isdisjoint(cached), "a used block is cached"
        counts = self.counts
        assert counts.free + counts.cached + counts.used + counts.copying == self.num_blocks
