"""Which hidden states of prompts are wanted: all of a prompt's, or that of one token, which some values need alone."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Places: TypeAlias = Sequence[int | None] | None
"""For each prompt the place of the token whose state is wanted, or None: all tokens' are. None alone: all of all."""


def wanted_rows(lengths: Sequence[int], places: Places) -> tuple[NDArray[np.int64], list[int]]:
    """Which rows of prompts of these lengths, one after another, are wanted, ascending; and how many of each prompt."""
    if places is None:
        return np.arange(sum(lengths)), list(lengths)
    starts = accumulate(lengths[:-1], initial=0)
    rows = [
        np.arange(start, start + length) if place is None else np.array([start + place])
        for start, length, place in zip(starts, lengths, places, strict=True)
    ]
    return np.concatenate(rows), list(map(len, rows))


def wanted_states(states: Sequence[Tensor], places: Places) -> list[Tensor]:
    """Of the states of each prompt [num_tokens, hidden_size], those that are wanted."""
    if places is None:
        return list(states)
    return [one if place is None else one[place : place + 1] for one, place in zip(states, places, strict=True)]
