"""Whether copies between device and host succeed: decided by a test instead of a random number."""

import random
from enum import Enum


class Fate(Enum):
    """For all copies from now on. The value replaces a random number in `MemoryWorker`."""

    FAILED = 0.0  # read at once, and answered in the step that carries them: they failed
    DONE = 0.3  # read at once, and answered in the step that carries them
    LATE = 0.9  # answered when a step has nothing else to do, and read only then


class Fates(random.Random):
    """The `rng` of a world with a given fate for copies."""

    fate = Fate.DONE

    def random(self) -> float:
        """The value of `fate`."""
        return self.fate.value
