"""Which tokens the grammars of a step allow."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that may be sampled for some rows of a step.

    `bits` int32 [len(rows), words]: bit t % 32 of word t // 32 is set if token t may follow. A row without any bit has
    no token: its matcher has failed.
    """

    rows: NDArray[np.int64]
    bits: NDArray[np.int32]

    def as_bools(self, vocab_size: int) -> NDArray[np.bool_]:
        """Whether each token may follow: [len(rows), vocab_size]."""
        unpacked = np.unpackbits(self.bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return unpacked.view(np.bool_)
