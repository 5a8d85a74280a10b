"""Drafts the tokens that followed the last occurrence of the sequence's last tokens (prompt lookup)."""

import numpy as np
from numpy.typing import NDArray

# How many last tokens are searched for, the longest first: a longer match makes a better guess.
_LENGTHS = (4, 3, 2)


class NgramDrafter:
    """Searches in the sequence's own prompt and output."""

    def draft(self, tokens: NDArray[np.int32], max_tokens: int) -> NDArray[np.int32]:
        for length in _LENGTHS:
            end = _end_of_last_match(tokens, length)
            if end is not None:
                # If fewer tokens follow the match than are requested, they are repeated.
                return tokens[end + np.arange(max_tokens) % (len(tokens) - end)]
        return tokens[:0]


def _end_of_last_match(tokens: NDArray[np.int32], length: int) -> int | None:
    """The end of the last earlier occurrence of the last `length` tokens."""
    num_places = len(tokens) - length
    if num_places <= 0:
        return None
    matches = tokens[:num_places] == tokens[-length]
    for offset in range(1, length):
        matches &= tokens[offset : offset + num_places] == tokens[offset - length]
    places = matches.nonzero()[0]
    return int(places[-1]) + length if len(places) else None


DRAFTER = NgramDrafter
