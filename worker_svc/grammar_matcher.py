"""The place of one sequence in its grammar."""

import hashlib
import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol, Self

from llguidance import LLMatcher

from svc_common.grammars import (
    GrammarTooComplex,
    InvalidGrammar,
    UnsupportedTokenizer,
    exceeds_lexer_limit,
    exceeds_limit,
)
from worker_svc.grammar_cache import CompiledGrammar
from worker_svc.slow_masks import Mask, takes_long
from worker_svc.step import FailureReason
from worker_svc.token_masks import TokenMasks

_TOKEN_LIMIT = "max_tokens"  # an attribute of rules

# Sequences of a grammar share llguidance's lexer. When that reaches a limit, such as that of its states, it fails for
# all of them, and they continue with a new one: a sequence once at any token, and once more for each of as many tokens.
_TOKENS_FOR_LEXER = 64


@dataclass(frozen=True, slots=True)
class MatcherFailure:
    """Why a sequence cannot continue in its grammar. The text is for the operator and has nothing of the client's."""

    text: str
    reason: FailureReason = FailureReason.INTERNAL


_NO_MATCH = MatcherFailure("its output does not match its grammar")
TOO_COMPLEX = MatcherFailure("its grammar exceeds the limits for one token", FailureReason.GRAMMAR_TOO_COMPLEX)


class MaskMaker(Protocol):
    """Makes masks on threads of its own. Until they are done, nothing may use the matchers."""

    def start_masks(self, matchers: "Sequence[tuple[int, GrammarMatcher]]") -> "Future[TokenMasks]":
        """The masks of these rows of a step."""

    def start_mask_ahead(self, matcher: "GrammarMatcher") -> "Future[Mask | None]":
        """The mask of a matcher that is slow, before a step needs it. None: a limit was reached."""


class GrammarMatcher:
    """What may follow the output of one sequence. `add` and `copy` are cheap: tokens are matched when that is needed.

    `failure` is set when the sequence cannot continue; then no token may follow.
    """

    __slots__ = (
        "__weakref__",
        "_ahead",
        "_compiled",
        "_continues",
        "_forced",
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
        "pace",
    )

    def __init__(
        self,
        compiler: MaskMaker,
        grammar: str,
        digest: bytes,
        compiled: CompiledGrammar,
        output: Iterable[int],
    ) -> None:
        """`digest` is the grammar's."""
        self.compiler, self.grammar = compiler, grammar
        self._compiled, self.pace = compiled.matcher, compiled.pace
        self._tokens = list(output)
        self._tokens_hash = hashlib.blake2b(digest, digest_size=16)
        self._tokens_hash.update(array("q", self._tokens))
        self._state: LLMatcher | None = None
        self._is_shared = False
        self._num_matched = 0
        self._num_lexers = 0
        self._has_waited = False
        self._ahead: Future[Mask | None] | None = None
        self._continues = bool(self._tokens)  # and has had no mask here yet
        self._forced: list[int] = []  # the next one last
        self.failure: MatcherFailure | None = None

    def add(self, token: int) -> None:
        """Adds an output token."""
        self._ahead = None
        if self._forced and self._forced.pop() != token:
            self._forced = []
        self._tokens.append(token)
        self._tokens_hash.update(array("q", (token,)))

    def copy(self) -> Self:
        """An independent copy."""
        copied = copy(self)
        copied._tokens = self._tokens.copy()
        copied._tokens_hash = self._tokens_hash.copy()
        copied._forced = self._forced.copy()
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
            self._continues = other._continues
            self._is_shared = other._is_shared = True

    @property
    def num_tokens(self) -> int:
        """How many output tokens were added."""
        return len(self._tokens)

    @property
    def num_pending(self) -> int:
        """How many of them `advance` would match."""
        return len(self._tokens) - self._num_matched

    @property
    def is_compiled(self) -> bool:
        """Whether `advance` would not wait for the compiler."""
        return self._state is not None or self._compiled.done()

    @property
    def is_slow(self) -> bool:
        """Whether a step must not wait for its next mask: it is being made, or may take long. Of a sequence that
        continues here that is not known: it is assumed, so that no step makes the masks of many slow sequences that
        were resubmitted.
        """
        is_made = self._ahead is not None and not self._ahead.done()
        return is_made or self._continues or self.pace.is_slow

    def prepare(self) -> bool:
        """Begins to make a mask that takes long. Returns whether no step would wait for it, nor for the compiler."""
        if self.is_slow and self._ahead is None and self.is_compiled:
            self._ahead = self.compiler.start_mask_ahead(self)
        return self.is_compiled if self._ahead is None else self._ahead.done()

    @property
    def awaited(self) -> "Future[Any]":
        """What `prepare` would have a step wait for: the mask that is made ahead, else the compilation."""
        return self._ahead or self._compiled

    @property
    def mask_ahead(self) -> Mask | None:
        """The mask, if it was made ahead, and without reaching a limit."""
        return None if self._ahead is None else self._ahead.result()

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

    def fill(self, mask: Mask) -> bool:
        """Sets the bits of the tokens that may follow in a mask of zeros. False: a limit was reached, or it failed."""
        state = self.advance()
        if state is not None and not state.is_error():
            state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._continues = False
        if state is not None and not state.is_error():
            return True
        mask[:] = 0
        return False

    @property
    def has_reached_limit(self) -> bool:
        """Whether it is in an error after which it may continue, with a new lexer."""
        return self.failure is None and self._state is not None and self._state.is_error()

    @property
    def may_have_new_lexer(self) -> bool:
        """Whether a matcher in an error may continue with a new lexer. If not, its failure is set."""
        if self._state is not None and not exceeds_lexer_limit(self._state.get_error()):
            self.failure = _failure(self._state)  # of the parser: it would fail again
        elif self._num_lexers > len(self._tokens) // _TOKENS_FOR_LEXER:
            self.failure = TOO_COMPLEX
        return self.failure is None

    def restart(self, compiled: LLMatcher) -> None:
        """Begins again, with the lexer of this matcher of the same grammar."""
        self._num_lexers += 1
        self._num_matched = 0
        self._state, self._is_shared = compiled.deep_copy(), False

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

    def forced_tokens(self, most: int) -> list[int]:
        """The first tokens of the only text that may follow; empty if there is a choice, or if a limit is reached.

        A sampled token may be a part of one. All tokens of the text are found at once, however long it is, and kept.
        """
        if not self._forced:
            state = self.advance()
            if state is None or state.is_error():
                return []
            started = time.thread_time()
            # Where the text has the literal of an added token, llguidance returns that token, which may not follow.
            forced = state.compute_ff_tokens()
            self._forced = forced[: state.validate_tokens(forced)][::-1]
            if takes_long(time.thread_time() - started):
                self.pace.note_slow()
        return self._forced[: -most - 1 : -1]

    def _start(self, compiled: Callable[[], LLMatcher]) -> LLMatcher | None:
        try:
            return compiled().deep_copy()
        except GrammarTooComplex:
            self.failure = TOO_COMPLEX
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
        if _consume(state, pending):
            return state
        if exceeds_lexer_limit(state.get_error()):
            return state
        self.failure = _failure(state)
        return None


def _consume(state: LLMatcher, tokens: Sequence[int]) -> bool:
    """Adds tokens to a matcher, until one is not admitted. Returns whether all are.

    One by one: an end-of-text token after the end of the text is an error to `consume_tokens`. llguidance keeps
    Python's lock while it adds one, which can take milliseconds; other threads, above all that of the steps, have it
    in between.
    """
    for place, token in enumerate(tokens):
        if place:
            time.sleep(0)
        if not state.consume_token(token):
            return False
    return True


def _failure(state: LLMatcher) -> MatcherFailure:
    return TOO_COMPLEX if exceeds_limit(state.get_error()) else _NO_MATCH
