"""The order in which cached blocks are evicted: by age, and by whether their contents were reused."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain


class EvictionOrder:
    """Segmented LRU (Karedla, Love and Wherry, 1994): blocks that were reused since they were filled, and others.

    The oldest block that was never reused is evicted first, so that a long scan of new prompts does not evict what many
    requests share. At most `protected` blocks count as reused; beyond that, the oldest of them joins the end of the
    others.
    """

    def __init__(self, protected: int) -> None:
        self._max_protected = protected
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._once or block_id in self._again

    def __iter__(self) -> Iterator[int]:
        """The blocks in the order of their eviction."""
        return chain(self._once, self._again)

    def add(self, block_id: int, *, found_again: bool) -> None:
        """A block lost its last owner."""
        if not found_again:
            self._once[block_id] = None
            return
        self._again[block_id] = None
        if len(self._again) > self._max_protected:
            self._once[self._again.popitem(last=False)[0]] = None

    def add_oldest(self, block_id: int, *, found_again: bool) -> None:
        """A block lost its last owner, and is evicted before all others of its segment."""
        segment = self._again if found_again else self._once
        segment[block_id] = None
        segment.move_to_end(block_id, last=False)

    def remove(self, block_id: int) -> None:
        """A block has an owner again."""
        if block_id in self._once:
            del self._once[block_id]
        else:
            del self._again[block_id]

    def pop(self) -> int:
        """Evicts the first block. There must be one."""
        row = self._once or self._again
        return row.popitem(last=False)[0]
