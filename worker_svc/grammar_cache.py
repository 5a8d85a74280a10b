"""The compiled grammars that a worker keeps, least recently used first, within a bound on their memory."""

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher

from svc_common.grammars import GRAMMAR_LIMITS
from worker_svc.metrics import set_cached_grammars
from worker_svc.slow_masks import MaskPace

CACHE_BYTES = 512 * 2**20
"""Of grammars that no sequence need use. Those in use are kept by their sequences."""
# llguidance does not report sizes. These are upper bounds of what was measured: a lexer with 20,000 states takes 13 MB,
# and a grammar of 31 kB takes 1.2 MB. A lexer grows while it is used, so each counts as one with all its states.
_BYTES_PER_STATE = 700
_BYTES_PER_GRAMMAR_BYTE = 40


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar that is compiled, or will be, and how quick its masks are."""

    matcher: Future[LLMatcher]
    pace: MaskPace


class GrammarCache:
    """Compiled grammars by digest. Calls may come from any thread."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[bytes, tuple[CompiledGrammar, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, digest: bytes) -> CompiledGrammar | None:
        """The grammar, which is now the last one used."""
        with self._lock:
            if digest not in self._grammars:
                return None
            self._grammars.move_to_end(digest)
            return self._grammars[digest][0]

    def put(self, digest: bytes, grammar: str, compiled: CompiledGrammar) -> None:
        """Adds a grammar that is not in the cache, and drops others while all may take more than CACHE_BYTES."""
        size = most_bytes(grammar)
        with self._lock:
            self._grammars[digest] = compiled, size
            self._num_bytes += size
            while self._num_bytes > CACHE_BYTES:
                _, (_, dropped) = self._grammars.popitem(last=False)
                self._num_bytes -= dropped
            set_cached_grammars(len(self._grammars))

    def drop(self, digest: bytes) -> None:
        """Removes the grammar, if it is there."""
        with self._lock:
            _, size = self._grammars.pop(digest, (None, 0))
            self._num_bytes -= size
            set_cached_grammars(len(self._grammars))


def most_bytes(grammar: str) -> int:
    """The most memory that a compiled grammar may take."""
    return GRAMMAR_LIMITS.max_lexer_states * _BYTES_PER_STATE + _BYTES_PER_GRAMMAR_BYTE * len(grammar.encode())
