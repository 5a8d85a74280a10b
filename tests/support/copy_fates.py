"""What becomes of copies between device and host: said by a test instead of drawn by chance."""

import random
from enum import Enum


class Fate(Enum):
    """Of all copies from now on; the value is what takes the place of a random number in `MemoryWorker`."""

    FAILED = 0.0  # read at once, and answered in the step that carries them: they failed
    DONE = 0.3  # read at once, and answered in the step that carries them
    LATE = 0.9  # answered when a step has nothing else to do, and read only then


class Fates(random.Random):
    """The `rng` of a world whose copies fare as it is told."""

    fate = Fate.DONE

    def random(self) -> float:
        """Always what `fate` stands for."""
        return self.fate.value
