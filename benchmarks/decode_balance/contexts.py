"""Contexts of ragged decodes."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]


def lognormal(num_seqs: int, median: int) -> Ints:
    """Lengths whose logarithm has a standard deviation of 1, as of prompts and outputs in traces of services."""
    drawn = np.random.default_rng(num_seqs).lognormal(np.log(median), 1.0, num_seqs)
    return drawn.clip(16, 32_768).astype(np.int32)


def one_long(num_short: int, short: int, long: int) -> Ints:
    return np.array([*[short] * num_short, long], np.int32)
