"""Drafters that draft from known texts."""

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from worker_svc.drafting import Drafter


class Oracle:
    """Drafts the next tokens of a text that starts with the known tokens: 0 to the maximum, at random. A third of the
    drafts have one random token."""

    def __init__(self, texts: Iterable[Items[int]], vocab_size: int, rng: random.Random) -> None:
        self._texts, self._vocab_size, self._rng = [list(text) for text in texts], vocab_size, rng

    def draft(self, tokens: NDArray[np.int32], max_tokens: int) -> list[int]:
        known, rng = tokens.tolist(), self._rng
        fitting = [text for text in self._texts if text[: len(known)] == known]
        end = len(known) + rng.randint(0, max_tokens)
        draft = rng.choice(fitting)[len(known) : end] if fitting else []
        if rng.random() < 1 / 3:
            draft = draft or [0]
            draft[rng.randrange(len(draft))] = rng.randrange(self._vocab_size)
        return draft


def knowing(texts: Iterable[Items[int]], vocab_size: int, seed: int = 0) -> Callable[[], Drafter]:
    """Creates drafters that share one random number generator."""
    oracle = Oracle(texts, vocab_size, random.Random(seed))
    return lambda: oracle
