"""Grammars: which tokens may follow the output of a sequence.

What a matcher allows is a function of its grammar and of the sequence's output tokens. So it is the same after a swap,
after a move to another worker, and with drafts. Only a limit of the lexer, which is shared, may end one sequence and
not another with the same tokens. One thread compiles grammars. Another one makes the masks while the forward pass runs,
and compiles again where a lexer reached a limit. The thread of the steps compiles nothing.
"""

import hashlib
import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, wait
from copy import copy
from dataclasses import dataclass
from itertools import takewhile
from typing import Self

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from svc_common.grammars import (
    GrammarTooComplex,
    InvalidGrammar,
    UnsupportedTokenizer,
    compile_grammar,
    exceeds_lexer_limit,
    exceeds_limit,
    grammar_threads,
)
from worker_svc.grammar_cache import GrammarCache
from worker_svc.metrics import count_grammar_compiled, count_masks
from worker_svc.step import FailureReason

_TOKEN_LIMIT = "max_tokens"  # an attribute of rules

_USUAL = "start: %json {}"

# For which a step waits for the grammars of its new sequences; or of all, if it has no others.
_MAX_WAIT_SECONDS = 0.02
# Sequences of a grammar share llguidance's lexer. When that reaches a limit, such as that of its states, it fails for
# all of them, and they continue with a new one: a sequence once at any token, and once more for each of as many tokens.
_TOKENS_FOR_LEXER = 64
# Lexers that are made in one step, each in the time of a compilation. If more are needed, the sequences fail.
_MAX_NEW_LEXERS = 4


@dataclass(frozen=True, slots=True)
class MatcherFailure:
    """Why a sequence cannot continue in its grammar. The text is for the operator and has nothing of the client's."""

    text: str
    reason: FailureReason = FailureReason.INTERNAL


_NO_MATCH = MatcherFailure("its output does not match its grammar")
_TOO_COMPLEX = MatcherFailure("its grammar exceeds the limits for one token", FailureReason.GRAMMAR_TOO_COMPLEX)


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
        self._cache = GrammarCache()

    def warm_up(self) -> str | None:
        """Waits for the tokenizer and makes a first mask. Returns why grammars cannot be applied."""
        try:
            self._tokenizer.result()
        except UnsupportedTokenizer as error:
            return str(error)
        self.start_masks([(0, self.matcher(_USUAL))]).result()
        return None

    def matcher(self, grammar: str, output: Iterable[int] = ()) -> "GrammarMatcher":
        """The matcher after these output tokens. The grammar is compiled if it is not known; nothing waits for it."""
        digest = _digest(grammar)
        return GrammarMatcher(self, grammar, digest, self._compiled(grammar, digest), output)

    def start_masks(self, matchers: Sequence[tuple[int, "GrammarMatcher"]]) -> "Future[TokenMasks]":
        """Makes the masks of these rows on another thread. Until they are done, the matchers must not be used."""
        return self._masking.submit(self._fill, matchers)

    def _compiled(self, grammar: str, key: bytes) -> "Future[LLMatcher]":
        compiled = self._cache.get(key)
        if compiled is None:
            compiled = self._compiling.submit(self._compile, grammar)
            self._cache.put(key, grammar, compiled)
        return compiled

    def _compile(self, grammar: str) -> LLMatcher:
        count_grammar_compiled()
        return compile_grammar(self._tokenizer.result(), grammar)

    def _fill(self, matchers: Sequence[tuple[int, "GrammarMatcher"]]) -> TokenMasks:
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

    def _masks_of(self, matchers: Sequence["GrammarMatcher"]) -> NDArray[np.int32]:
        """The mask of each matcher: [len(matchers), words]."""
        states = [matcher.advance() for matcher in matchers]
        ready = [(state, place) for place, state in enumerate(states) if state is not None and not state.is_error()]
        bits = np.zeros((len(matchers), self._num_words), np.int32)
        if ready:
            self._executor.unsafe_compute_mask_ptr(ready, bits.ctypes.data, 4 * self._num_words, len(bits))
        new_lexers = _NewLexers(self._compile_again)
        for place, state in enumerate(states):
            if state is not None and state.is_error():
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

    def continue_mask(self, matcher: "GrammarMatcher", bits: NDArray[np.int32]) -> None:
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
            state = matcher.restart(compiled)
            if state is None:
                return
            if not state.is_error():
                state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if not state.is_error():
                return
            bits[:] = 0
            del self._by_grammar[matcher.grammar]
        matcher.failure = _TOO_COMPLEX


class GrammarMatcher:
    """What may follow the output of one sequence. `add` and `copy` are cheap: tokens are matched when that is needed.

    `failure` is set when the sequence cannot continue; then no token may follow.
    """

    __slots__ = (
        "_compiled",
        "_has_waited",
        "_is_shared",
        "_num_lexers",
        "_num_matched",
        "_state",
        "_tokens",
        "_tokens_hash",
        "compiler",
        "failure",
        "grammar",
    )

    def __init__(
        self,
        compiler: GrammarCompiler,
        grammar: str,
        digest: bytes,
        compiled: "Future[LLMatcher]",
        output: Iterable[int],
    ) -> None:
        """`digest` is the grammar's."""
        self.compiler, self.grammar, self._compiled = compiler, grammar, compiled
        self._tokens = list(output)
        self._tokens_hash = hashlib.blake2b(digest, digest_size=16)
        self._tokens_hash.update(array("q", self._tokens))
        self._state: LLMatcher | None = None
        self._is_shared = False
        self._num_matched = 0
        self._num_lexers = 0
        self._has_waited = False
        self.failure: MatcherFailure | None = None

    def add(self, token: int) -> None:
        """Adds an output token."""
        self._tokens.append(token)
        self._tokens_hash.update(array("q", (token,)))

    def copy(self) -> Self:
        """An independent copy."""
        copied = copy(self)
        copied._tokens = self._tokens.copy()
        copied._tokens_hash = self._tokens_hash.copy()
        copied._state = None if self._state is None else self._state.deep_copy()
        copied._is_shared = False
        return copied

    @property
    def key(self) -> Hashable:
        """Equal for matchers that are interchangeable: they have equal grammars and output tokens."""
        return self._tokens_hash.digest(), self._num_lexers, self.failure is None

    def share(self, other: Self) -> None:
        """Takes over where another matcher, which was equal before its mask was made, is now.

        Their state is copied by the one that next adds a token to it.
        """
        if other is not self:
            self._state, self._num_matched = other._state, other._num_matched
            self._num_lexers, self.failure = other._num_lexers, other.failure
            self._is_shared = other._is_shared = True

    @property
    def num_tokens(self) -> int:
        """How many output tokens were added."""
        return len(self._tokens)

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would not wait for the compiler."""
        return self._state is not None or self._compiled.done()

    def starts_waiting(self) -> bool:
        """Whether this is the first call, which a step makes if the matcher is not ready."""
        is_first, self._has_waited = not self._has_waited, True
        return is_first

    def advance(self) -> LLMatcher | None:
        """llguidance's matcher after all tokens, in an error if its lexer reached a limit; None after a failure.

        Waits until the grammar is compiled.
        """
        if self.failure is not None:
            return None
        if self._state is None:
            self._state = self._start(self._compiled.result)
        return self._match()

    @property
    def may_have_new_lexer(self) -> bool:
        """Whether a matcher in an error may continue with a new lexer. If not, its failure is set."""
        if self._state is not None and not exceeds_lexer_limit(self._state.get_error()):
            self.failure = _failure(self._state)  # of the parser: it would fail again
        elif self._num_lexers > len(self._tokens) // _TOKENS_FOR_LEXER:
            self.failure = _TOO_COMPLEX
        return self.failure is None

    def restart(self, compiled: LLMatcher) -> LLMatcher | None:
        """`advance` from the beginning, with the lexer of this matcher of the same grammar."""
        self._num_lexers += 1
        self._num_matched = 0
        self._state, self._is_shared = compiled.deep_copy(), False
        return self._match()

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other; 0 if a limit is reached."""
        state = self.advance()
        if state is None or state.is_error():
            return 0
        num_valid = state.validate_tokens(list(tokens))
        if _TOKEN_LIMIT not in self.grammar:
            return num_valid
        # `validate_tokens` does not count the tokens of a rule.
        trial = state.deep_copy()
        return sum(1 for _ in takewhile(trial.consume_token, tokens[:num_valid]))

    def forced_tokens(self) -> list[int]:
        """Tokens of the only text that may follow; empty if there is a choice, or if a limit is reached.

        A sampled token may be a part of one.
        """
        state = self.advance()
        return [] if state is None or state.is_error() else state.compute_ff_tokens()

    def _start(self, compiled: Callable[[], LLMatcher]) -> LLMatcher | None:
        try:
            return compiled().deep_copy()
        except GrammarTooComplex:
            self.failure = _TOO_COMPLEX
        except InvalidGrammar:
            self.failure = MatcherFailure("its grammar cannot be compiled")
        except UnsupportedTokenizer:
            self.failure = MatcherFailure("grammars cannot be applied to this model's tokenizer")
        return None

    def _match(self) -> LLMatcher | None:
        state = self._state
        if state is None or self._num_matched == len(self._tokens):
            return state
        if self._is_shared:
            state = self._state = state.deep_copy()
            self._is_shared = False
        pending, self._num_matched = self._tokens[self._num_matched :], len(self._tokens)
        # One by one: an end-of-text token after the end of the text is an error to `consume_tokens`.
        if all(map(state.consume_token, pending)):
            return state
        if exceeds_lexer_limit(state.get_error()):
            return state
        self.failure = _failure(state)
        return None


def wait_until_ready(matchers: Iterable[GrammarMatcher]) -> None:
    """Waits until these grammars are compiled, for a short time at most: usual ones take 1 ms."""
    wait([matcher._compiled for matcher in matchers], _MAX_WAIT_SECONDS)


def _failure(state: LLMatcher) -> MatcherFailure:
    return _TOO_COMPLEX if exceeds_limit(state.get_error()) else _NO_MATCH


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
