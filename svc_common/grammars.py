"""Grammars: what gateways check before a request is accepted, and what workers compile. Both within the same limits.

A grammar is a text in llguidance's Lark syntax. The limits count work and sizes, not time, so every process accepts the
same grammars. llguidance is imported when it is needed: schedulers do not have it.
"""

import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from svc_common.tokenizer_errors import tokenizer_errors

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_BYTES = 128 * 1024
"""Of the grammar's UTF-8."""

JSON_ON_ONE_LINE: Mapping[str, bool | str] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""llguidance's options for a schema: JSON on one line, with at most a space after each comma and colon. Where more
whitespace is allowed, small models fill the output with it."""

_STACK_BYTES = 64 * 2**20
"""llguidance recurses once for each rule in a chain of rules, and a thread that runs out of stack ends the process.
This is four times what the deepest grammar of MAX_GRAMMAR_BYTES needs; only pages that are touched take memory."""

_stack_size_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Arguments of llguidance's LLParserLimits. Fuel is nodes of regular expressions, 14 to 50 per microsecond."""

    initial_lexer_fuel: int = 300_000
    """To compile a grammar's regular expressions: 0.1 s at most, but for intersections of many. Rules take more time:
    30 to 50 ms for 5,000."""
    step_lexer_fuel: int = 50_000
    """For one mask: 8 ms at most."""
    step_max_items: int = 3_000
    """Items of the parser for one mask. Only ambiguous grammars need so many."""
    max_items_in_row: int = 2_000
    max_lexer_states: int = 20_000
    """1 to 2 kB each."""
    max_grammar_size: int = 100_000
    """Symbols in the grammar's rules."""
    verbose_errors: bool = False
    """Errors would contain what was generated."""


GRAMMAR_LIMITS = GrammarLimits()


class UnsupportedTokenizer(Exception):  # noqa: N818
    """llguidance cannot use a model's tokenizer. The text is for the operator."""


class InvalidGrammar(Exception):  # noqa: N818
    """A grammar that cannot be compiled. The text is llguidance's, without the lines of the grammar: it names the place
    and may quote parts of the grammar, of any length.
    """


class GrammarTooComplex(InvalidGrammar):
    """A grammar that exceeds a limit."""


def load_grammar_tokenizer(
    tokenizer_json: str, eos_token_ids: Sequence[int], vocab_size: int | None = None
) -> "LLTokenizer":
    """The vocabulary that grammars are compiled for, in about a second.

    `tokenizer_json` is the text of the file of this name. `vocab_size` is that of the model's logits; None: that of the
    tokenizer. Tokens beyond the tokenizer's are never allowed, also of `eos_token_ids`. Raises UnsupportedTokenizer.
    """
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

    with tokenizer_errors(
        lambda error: UnsupportedTokenizer(f"grammars cannot be applied to the model's tokenizer: {error}")
    ):
        tokenizer = Tokenizer.from_str(tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        known = [token_id for token_id in eos_token_ids if tokenizer.id_to_token(token_id) is not None]
        if known:
            return LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=known)
    raise UnsupportedTokenizer("the tokenizer has no end-of-text token of the model, which ends the text of a grammar")


def compile_grammar(tokenizer: "LLTokenizer", grammar: str) -> "LLMatcher":
    """A matcher at the beginning of the text. Call it in a thread of `grammar_threads`.

    Raises InvalidGrammar, or GrammarTooComplex.
    """
    from llguidance import LLMatcher, LLParserLimits

    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarTooComplex(f"the grammar has {size} bytes, and {MAX_GRAMMAR_BYTES} are allowed")
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**asdict(GRAMMAR_LIMITS)))
    if matcher.is_error():
        error = matcher.get_error()
        raise (GrammarTooComplex if exceeds_limit(error) else InvalidGrammar)(_LINES_OF_GRAMMAR.sub("", error).strip())
    return matcher


def grammar_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Threads with the stack that the largest grammars need. llguidance releases the GIL while it compiles."""
    threads = ThreadPoolExecutor(count, name)
    # The size of a stack is a setting of the whole process, read when a thread starts.
    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            barrier = threading.Barrier(count)
            for _ in range(count):
                threads.submit(barrier.wait)
        finally:
            threading.stack_size(before)
    return threads


def exceeds_lexer_limit(error: str) -> bool:
    """The same for a limit of the lexer, which matchers with equal grammars may share: it fails for all of them."""
    return error.lower().startswith("lexer error") and exceeds_limit(error)


def exceeds_limit(error: str) -> bool:
    """Whether llguidance's text says that a limit was exceeded; there is no other sign of it."""
    cause = _LINES_OF_GRAMMAR.sub("", error)
    if "regex parse error:\n" in cause:
        cause = cause.rpartition("\nerror: ")[2]
    else:
        cause = _BEFORE_CAUSE.sub("", cause.rpartition("(in regex): ")[2])
    own_words = _QUOTATION.split(cause, maxsplit=1)[0].lower()
    return any(words in own_words for words in _TEXTS_OF_LIMITS)


# An error ends with the lines of the grammar that it is about.
_LINES_OF_GRAMMAR = re.compile(r"\n +\d+ \|.*", re.DOTALL)
# An error may begin with its place and with what failed. Words of the grammar stand in quotes, between slashes or after
# a colon.
_BEFORE_CAUSE = re.compile(
    r"""^(?:at\ )?(?:\d+\(\d+\):\ )?
    (?:failed\ to\ compile\ JSON\ schema:\ |failed\ to\ parse\ "%json":\ |lexer\ error:\ |parser\ error:\ )?""",
    re.VERBOSE | re.IGNORECASE,
)
_QUOTATION = re.compile("[\"'`/:]")
_TEXTS_OF_LIMITS = (
    "lexer precomputation failed",
    "initial_lexer_fuel",
    "too many",
    "too large",
    "too big",
    "too complex",
    "too deeply nested",
    "exceeds size limit",
    "exceed the maximum",
    "fuel exhausted",
    "unable to determine if regex is empty",
    "recursion limit exceeded",
    "max is ",
    "panic",
)
