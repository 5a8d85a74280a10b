"""A list of integers that numpy reads without a copy."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


class IntList:
    """An int32 array that grows at its end in amortised constant time."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, values: ArrayLike = ()) -> None:
        self._buffer = np.array(values, np.int32)
        self._length = len(self._buffer)

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> NDArray[np.int32]:
        """A view of the values [length]. It does not follow later growth."""
        return self._buffer[: self._length]

    def __setitem__(self, place: int, value: int) -> None:
        """Changes an existing value."""
        if not 0 <= place < self._length:
            raise IndexError(place)
        self._buffer[place] = value

    def append(self, value: int) -> None:
        if self._length == len(self._buffer):
            self._reserve(1)
        self._buffer[self._length] = value
        self._length += 1

    def extend(self, values: ArrayLike) -> None:
        added = np.asarray(values, np.int32)
        self._reserve(len(added))
        self._buffer[self._length : self._length + len(added)] = added
        self._length += len(added)

    def _reserve(self, count: int) -> None:
        needed = self._length + count
        if needed > len(self._buffer):
            grown = np.empty(max(needed, 2 * self._length, 16), np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
