"""A heap whose items can be removed and change their keys: old entries stay in it until they come to the top."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
K = TypeVar("K")  # keys of one heap compare with each other


class LazyHeap(Generic[T, K]):
    """Items by key, the smallest first; of equal keys, the one that was added first. Amortized O(log n) each."""

    def __init__(self) -> None:
        self._entries: dict[T, tuple[K, int, T]] = {}
        self._heap: list[tuple[K, int, T]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    def key(self, item: T) -> K:
        """The key of an item. Raises KeyError if there is no such item."""
        return self._entries[item][0]

    def put(self, item: T, key: K) -> None:
        """Adds an item, or changes its key."""
        entry = (key, self._num_added, item)
        self._num_added += 1
        self._entries[item] = entry
        heapq.heappush(self._heap, entry)
        self._compact()

    def discard(self, item: T) -> None:
        """Removes an item, if it is there."""
        if self._entries.pop(item, None) is not None:
            self._compact()

    def first(self) -> tuple[K, T] | None:
        """The smallest key and its item, without removing it."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[0], entry[2]
            heapq.heappop(heap)
        return None

    def ascending(self) -> Iterator[tuple[K, T]]:
        """Keys and items from the smallest key, without removing them; O(log n) each. The heap must not change."""
        heap, entries = self._heap, self._entries
        next_ones = [(heap[0], 0)] if heap else []  # entries whose parents have been passed, with their indices
        while next_ones:
            entry, index = heapq.heappop(next_ones)
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(next_ones, (heap[child], child))
            if entries.get(entry[2]) is entry:
                yield entry[0], entry[2]

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + 16:  # more than half are old
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
