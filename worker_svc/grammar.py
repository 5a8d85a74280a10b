"""Grammars: which tokens may follow the output of a sequence.

What a matcher allows is a function of its grammar and of the sequence's output tokens. So it is the same after a swap,
after a move to another worker, and with drafts. Only a limit of the lexer, which is shared, may end one sequence and
not another with the same tokens. One thread compiles grammars, each with a first mask. Another one makes the masks
while the forward pass runs, and compiles again where a lexer reached a limit. A third one makes masks that take long,
before a step needs them. The thread of the steps compiles nothing.
"""

import hashlib
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from svc_common.grammars import (
    GrammarTooComplex,
    UnsupportedTokenizer,
    compile_grammar,
    exceeds_limit,
    grammar_threads,
)
from worker_svc.grammar_cache import CompiledGrammar, GrammarCache
from worker_svc.grammar_matcher import TOO_COMPLEX, GrammarMatcher
from worker_svc.metrics import count_grammar_compiled, count_masks
from worker_svc.slow_masks import Mask, MaskPace, MaskTimer, SlowMasks, takes_too_long
from worker_svc.token_masks import TokenMasks

_USUAL = "start: %json {}"

# Lexers that are made in one step, each in the time of a compilation. If more are needed, the sequences fail.
_MAX_NEW_LEXERS = 4


class GrammarCompiler:
    """Compiles the grammars of one model's vocabulary, keeps those used last, and makes masks."""

    def __init__(self, load_tokenizer: Callable[[int], LLTokenizer], vocab_size: int, num_threads: int = 1) -> None:
        """`load_tokenizer` makes the tokenizer for logits of `vocab_size`, on another thread. If it raises
        UnsupportedTokenizer, sequences with grammars fail. `num_threads` make the masks of a step.
        """
        self._compiling, self._masking = grammar_threads(1, "grammars"), grammar_threads(1, "masks")
        self._executor = LLExecutor(num_threads)
        self._tokenizer = self._compiling.submit(load_tokenizer, vocab_size)
        self._num_words = -(-vocab_size // 32)
        self._mask_timer, self._slow_masks = MaskTimer(always_measures=num_threads == 1), SlowMasks(self._num_words)
        self._cache = GrammarCache()

    def warm_up(self) -> str | None:
        """Waits for the tokenizer and makes a first mask. Returns why grammars cannot be applied."""
        try:
            self._tokenizer.result()
        except UnsupportedTokenizer as error:
            return str(error)
        self.start_masks([(0, self.matcher(_USUAL))]).result()
        return None

    def matcher(self, grammar: str, output: Iterable[int] = ()) -> GrammarMatcher:
        """The matcher after these output tokens. The grammar is compiled if it is not known; nothing waits for it."""
        digest = _digest(grammar)
        return GrammarMatcher(self, grammar, digest, self._compiled(grammar, digest), output)

    def start_masks(self, matchers: Sequence[tuple[int, GrammarMatcher]]) -> "Future[TokenMasks]":
        """Makes the masks of these rows on another thread. Until they are done, the matchers must not be used."""
        return self._masking.submit(self._fill, matchers)

    def start_mask_ahead(self, matcher: GrammarMatcher) -> "Future[Mask | None]":
        """Makes the mask of a matcher that is slow, before a step needs it."""
        return self._slow_masks.start(matcher)

    def _compiled(self, grammar: str, key: bytes) -> CompiledGrammar:
        compiled = self._cache.get(key)
        if compiled is None:
            pace = MaskPace()
            compiled = CompiledGrammar(self._compiling.submit(self._compile_and_try, grammar, pace), pace)
            self._cache.put(key, grammar, compiled)
        return compiled

    def _compile_and_try(self, grammar: str, pace: MaskPace) -> LLMatcher:
        """With a first mask: no step waits for it, nor for those after it where it took long. Raises InvalidGrammar,
        also where it reaches a limit.
        """
        compiled = self._compile(grammar)
        mask = np.zeros(self._num_words, np.int32)
        started = time.thread_time()
        first = compiled.deep_copy()
        first.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if first.is_error() and exceeds_limit(first.get_error()):
            raise GrammarTooComplex
        if takes_too_long(time.thread_time() - started):
            pace.note_slow()
        return compiled

    def _compile(self, grammar: str) -> LLMatcher:
        count_grammar_compiled()
        return compile_grammar(self._tokenizer.result(), grammar)

    def _fill(self, matchers: Sequence[tuple[int, GrammarMatcher]]) -> TokenMasks:
        started = time.perf_counter()
        # Equal matchers share the mask and the state of the first of them.
        firsts: list[GrammarMatcher] = []
        place_of_key: dict[Hashable, int] = {}
        places: list[int] = []
        for _, matcher in matchers:
            places.append(place_of_key.setdefault(matcher.key, len(firsts)))
            if places[-1] == len(firsts):
                firsts.append(matcher)
        bits = self._masks_of(firsts)
        if len(firsts) < len(matchers):
            for place, (_, matcher) in zip(places, matchers, strict=True):
                matcher.share(firsts[place])
            bits = bits[places]
        count_masks(len(firsts), time.perf_counter() - started)
        return TokenMasks(np.array([row for row, _ in matchers], np.int64), bits)

    def _masks_of(self, matchers: Sequence[GrammarMatcher]) -> NDArray[np.int32]:
        """The mask of each matcher: [len(matchers), words]."""
        bits = np.zeros((len(matchers), self._num_words), np.int32)
        now: list[int] = []  # places of those that were not made ahead
        for place, matcher in enumerate(matchers):
            if (mask := matcher.mask_ahead) is None:
                now.append(place)
            else:
                bits[place] = mask

        def fill_all() -> None:
            states = [(matchers[place].advance(), place) for place in now]
            ready = [(state, place) for state, place in states if state is not None and not state.is_error()]
            if ready:
                self._executor.unsafe_compute_mask_ptr(ready, bits.ctypes.data, 4 * self._num_words, len(bits))

        self._mask_timer.run([(matchers[place], bits[place]) for place in now], fill_all)
        new_lexers = _NewLexers(self._compile_again)
        for place in now:
            if matchers[place].has_reached_limit:
                bits[place] = 0
                new_lexers.continue_mask(matchers[place], bits[place])
        return bits

    def _compile_again(self, grammar: str) -> LLMatcher:
        """With a new lexer. The cached one, which has reached a limit, is dropped."""
        self._cache.drop(_digest(grammar))
        return self._compile(grammar)


class _NewLexers:
    """Lexers in place of those that reached a limit, for the matchers of one step.

    A new lexer serves all matchers of a grammar. If one of them fails with a lexer that no other has used, it is that
    one which exceeds the limits.
    """

    def __init__(self, compile_again: Callable[[str], LLMatcher]) -> None:
        self._compile_again = compile_again
        self._by_grammar: dict[str, LLMatcher] = {}
        self._num_left = _MAX_NEW_LEXERS

    def continue_mask(self, matcher: GrammarMatcher, bits: NDArray[np.int32]) -> None:
        """Makes the mask of a matcher in an error, or sets its failure. `bits` are 0 before, and after a failure."""
        if not matcher.may_have_new_lexer:
            return
        is_new = False
        while not is_new:
            compiled = self._by_grammar.get(matcher.grammar)
            is_new = compiled is None
            if compiled is None:
                if not self._num_left:
                    break
                self._num_left -= 1
                compiled = self._by_grammar[matcher.grammar] = self._compile_again(matcher.grammar)
            matcher.restart(compiled)
            if matcher.fill(bits) or not matcher.has_reached_limit:
                return
            del self._by_grammar[matcher.grammar]
        matcher.failure = TOO_COMPLEX


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
