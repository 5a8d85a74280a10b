"""Drafters, which guess tokens of a sequence: one module of `drafters` each, or an entry point of `quire.drafters`.

A guess costs a row of the forward pass and changes no token: each row samples what it would have sampled without a
draft, and a draft token counts if it is the sampled token.
"""

import logging
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from numpy.typing import NDArray

from worker_svc import drafters
from worker_svc.errors import StartupFailed
from worker_svc.plugins import Registry
from worker_svc.sequences import Sequence

logger = logging.getLogger("quire.worker")


class Drafter(Protocol):
    """Guesses the tokens of one sequence. For the thread that runs steps, which waits for it."""

    def draft(self, tokens: NDArray[np.int32], max_tokens: int) -> Iterable[int]:
        """Up to `max_tokens` tokens that may follow `tokens`; fewer or none if there is no good guess.

        `tokens` are the prompt and all output so far. They must not be changed or kept. They begin with the tokens of
        the call before.
        """


DrafterFactory: TypeAlias = Callable[[], Drafter]
"""Makes the drafter of one sequence. It is dropped with the sequence."""

_registry = Registry(drafters, "DRAFTER", "quire.drafters", callable, "a function or class that makes a Drafter")


def find_drafter(name: str) -> DrafterFactory:
    """The drafter of this name. Raises StartupFailed if there is none or it cannot be created."""
    factory: DrafterFactory | None = _registry.find(name)
    if factory is None:
        raise StartupFailed(f"QUIRE_DRAFTER is {name}; known drafters are {', '.join(_registry.names())}")
    with _registry.running(name):
        tuple(map(int, factory().draft(np.zeros(1, np.int32), 1)))
    return factory


class _NoDrafter:
    """Never guesses."""

    def draft(self, tokens: NDArray[np.int32], max_tokens: int) -> Iterable[int]:
        return ()


class Drafting:
    """The drafters of the worker's sequences."""

    def __init__(self, make: DrafterFactory, vocab_size: int) -> None:
        self._make, self._vocab_size = make, vocab_size
        self._drafters: WeakKeyDictionary[Sequence, Drafter] = WeakKeyDictionary()
        self._stopped: WeakSet[Sequence] = WeakSet()

    def draft(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` tokens that may follow the known tokens of a sequence.

        With a grammar these are the tokens that it forces; where it forces none, those of the drafter that it allows.
        A drafter that fails is logged and not called again for this sequence, which continues without drafts.
        """
        if sequence in self._stopped:
            return ()
        matcher = sequence.matcher
        if matcher is None:
            return self._guess(sequence, max_tokens)
        if not matcher.is_compiled or matcher.is_slow:
            return ()  # the step must not wait
        known = sequence.tokens.values[sequence.prompt_length + matcher.num_tokens :]
        for token in known.tolist():
            matcher.add(token)
        if forced := matcher.forced_tokens(max_tokens):
            return tuple(forced)
        draft = self._guess(sequence, max_tokens)
        return draft[: matcher.num_allowed(draft)] if draft else ()

    def _guess(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        tokens = sequence.tokens.values
        tokens.flags.writeable = False
        try:
            drafter = self._drafters.get(sequence)
            if drafter is None:
                drafter = self._drafters[sequence] = self._make()
            draft = tuple(map(int, drafter.draft(tokens, max_tokens)))[:max_tokens]
            if draft and not 0 <= min(draft) <= max(draft) < self._vocab_size:
                raise ValueError("a token beyond the vocabulary")
        except Exception as error:  # any exception of another package's code
            self._drafters[sequence] = _NoDrafter()
            # The exception's text may hold tokens.
            where = traceback.extract_tb(error.__traceback__)[-1]
            logger.warning(
                "drafter failed", extra={"why": type(error).__name__, "where": f"{where.filename}:{where.lineno}"}
            )
            return ()
        return draft

    def stop(self, sequence: Sequence) -> None:
        """Drafts no more for a sequence, not even what its grammar forces."""
        self._stopped.add(sequence)
