"""The order in which the requests of a batch are sent: those whose bodies begin alike, one after another.

The server then still has the keys and values of what they have in common, also where those of all requests of the file
would not fit into its memory.
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise

_LENGTHS = (512, 2_048, 8_192, 32_768)  # bytes of a body, about a quarter as many tokens


class SendingOrder:
    """Sorts requests by the beginnings of their bodies, and otherwise leaves them in the order of the file."""

    def __init__(self) -> None:
        self._hashes = tuple(array("q") for _ in _LENGTHS)

    def add(self, body: bytes) -> None:
        """Adds the next request of the file."""
        for length, hashes in zip(_LENGTHS, self._hashes, strict=True):
            hashes.append(hash(body[:length]))

    def places(self) -> Sequence[int]:
        """The requests in the order in which they are sent, as their places in the file, from 0.

        Requests with the same beginning are where the first of them is; among them, those with a longer one in common
        are together.
        """
        order = list(range(len(self._hashes[0])))
        for hashes in reversed(self._hashes):  # sorting is stable: the shortest beginning, sorted last, comes first
            firsts = _first_places(hashes)
            if firsts:
                places = [firsts.get(value, place) for place, value in enumerate(hashes)]
                order.sort(key=places.__getitem__)
        return array("q", order)


def _first_places(hashes: Sequence[int]) -> dict[int, int]:
    """The first place of each hash that is there more than once."""
    repeated = {low for low, high in pairwise(sorted(hashes)) if low == high}
    firsts: dict[int, int] = {}
    for place, value in enumerate(hashes):
        if value in repeated:
            firsts.setdefault(value, place)
    return firsts
