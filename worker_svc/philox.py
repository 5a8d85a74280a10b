"""Philox4x32-10, the counter-based random numbers of sampling, over numpy arrays.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import numpy as np
from numpy.typing import NDArray

UInt32s = NDArray[np.uint32]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_HALF = np.uint64(32)


def philox4x32(counter: tuple[UInt32s, ...], key: tuple[UInt32s, ...]) -> tuple[UInt32s, ...]:
    """Four random words [n] for each counter of four words [n] under its key of two words [n]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0.astype(np.uint64) * _MULTIPLIERS[0]
        product1 = c2.astype(np.uint64) * _MULTIPLIERS[1]
        c0 = (product1 >> _HALF).astype(np.uint32) ^ c1 ^ k0
        c1 = product1.astype(np.uint32)
        c2 = (product0 >> _HALF).astype(np.uint32) ^ c3 ^ k1
        c3 = product0.astype(np.uint32)
        k0 = k0 + _WEYL[0]
        k1 = k1 + _WEYL[1]
    return c0, c1, c2, c3


def uniforms(seeds: NDArray[np.uint64], indices: UInt32s, positions: UInt32s) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each seed [n], sequence index [n] and position [n]."""
    key = (seeds.astype(np.uint32), (seeds >> _HALF).astype(np.uint32))
    zeros = np.zeros_like(positions)
    high, low, _, _ = philox4x32((positions, indices, zeros, zeros), key)
    return ((high >> np.uint32(5)) * 67108864.0 + (low >> np.uint32(6))) / 9007199254740992.0
