"""Ids of sequences, by which a worker knows which of them is the newest."""

from itertools import count

_BITS = 32
"""Low bits: a counter over all sequences."""


class SequenceIds:
    """Unique in a generation, and ascending with the arrival of requests.

    A worker that lacks memory for a step leaves out the sequence with the largest id. A beam that goes on with other
    tokens has a new id, but is no newer than its request.
    """

    def __init__(self) -> None:
        self._count = count()

    def of_request(self, arrival: int) -> int:
        """A new id for a sequence of a request; `arrival` is the number of requests that came before it."""
        return arrival << _BITS | next(self._count) % (1 << _BITS)
