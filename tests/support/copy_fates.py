"""Makes copies between device and host succeed or fail as a test decides, instead of at random."""

import random
from enum import Enum


class Fate(Enum):
    """The outcome of all later copies. The value replaces a random number in `MemoryWorker`."""

    FAILED = 0.0  # read at once, confirmed by the same step, as failed
    DONE = 0.3  # read at once, confirmed by the same step
    LATE = 0.9  # read and confirmed late, by a step that has no other work


class Fates(random.Random):
    """An `rng` for a world, with this outcome for all copies."""

    fate = Fate.DONE

    def random(self) -> float:
        """The value of the outcome."""
        return self.fate.value
