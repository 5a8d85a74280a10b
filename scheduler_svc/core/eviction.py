"""The order in which cached blocks are given up: by age, and by whether anybody ever came back for them."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain


class EvictionOrder:
    """Blocks without an owner, in two rows: those that were found again since they were filled, and those never.

    The oldest block never found again goes first, so that one long scan of new prompts does not push out what many
    requests share. Blocks found again may be at most `protected` in number; beyond that their oldest joins the end of
    the other row. This is segmented LRU (Karedla, Love and Wherry, 1994).
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
        """The blocks, those first that would go first."""
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
        """A block lost its last owner, and is to go before all others of its row."""
        row = self._again if found_again else self._once
        row[block_id] = None
        row.move_to_end(block_id, last=False)

    def remove(self, block_id: int) -> None:
        """A block has an owner again."""
        if block_id in self._once:
            del self._once[block_id]
        else:
            del self._again[block_id]

    def pop(self) -> int:
        """Give up the first. There must be one."""
        row = self._once or self._again
        return row.popitem(last=False)[0]
