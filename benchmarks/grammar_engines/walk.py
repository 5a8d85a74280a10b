"""Compiles constraints with xgrammar and with llguidance, and walks through their masks.

    python walk.py FOLDER_WITH_TOKENIZER EOS_TOKEN < CASES

It runs in an environment of these packages, without Quire. Standard input is JSON: [{"name", "schema"} or {"name",
"regex"}, with "lark": the same for llguidance]. A walk takes at each place a token that the mask allows: mostly one
that ends something, else any. Prints one line of JSON: {engine: {"version", "cases": [{"compile", "masks", "texts"}]}},
times in seconds; a case that an engine does not compile has "error" instead.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xgrammar
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

_COMPILES, _WALKS, _MOST = 5, 5, 200  # of each case; tokens of a walk
_ENDS = ('"', "}", "]", "null", "0", "1", "@", ".", "c")

Bits = Any
"""A mask: int32, a bit for each token."""


class Matcher(Protocol):
    """The state of a grammar after some tokens."""

    def fill(self, mask: Bits) -> None:
        """Writes which tokens may come next."""

    def accept(self, token: int) -> None:
        """A token comes."""

    def is_complete(self) -> bool:
        """Whether the text may end here."""


class LlguidanceMatcher:
    def __init__(self, vocabulary: LLTokenizer, grammar: str) -> None:
        self._state = LLMatcher(vocabulary, grammar, log_level=0)
        if self._state.is_error():
            raise ValueError(self._state.get_error())

    def fill(self, mask: Bits) -> None:
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> None:
        if not self._state.consume_token(token):
            raise ValueError("a token of the mask is refused")

    def is_complete(self) -> bool:
        return bool(self._state.is_accepting())


class XgrammarMatcher:
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._state = xgrammar.GrammarMatcher(compiled)

    def fill(self, mask: Bits) -> None:
        self._state.fill_next_token_bitmask(mask.reshape(1, -1), 0)

    def accept(self, token: int) -> None:
        if not self._state.accept_token(token):
            raise ValueError("a token of the mask is refused")

    def is_complete(self) -> bool:
        return bool(self._state.is_completed())


def walk(matcher: Matcher, ends: list[int], eos: int, size: int, rng: random.Random) -> tuple[list[int], list[float]]:
    """The tokens of a text, and the seconds of each mask. The text may lack its end."""
    mask = np.zeros((size + 31) // 32, np.int32)
    tokens: list[int] = []
    seconds: list[float] = []
    while len(tokens) < _MOST and not (matcher.is_complete() and rng.random() < 0.5):
        started = time.perf_counter()
        matcher.fill(mask)
        seconds.append(time.perf_counter() - started)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size])
        allowed = allowed[allowed != eos]
        if not len(allowed):
            break
        closing = [token for token in ends if token in allowed]
        token = rng.choice(closing) if closing and rng.random() < 0.7 else int(rng.choice(allowed))
        tokens.append(token)
        matcher.accept(token)
    return tokens, seconds


def measure(
    make: Callable[[], Matcher], tokenizer: Tokenizer, ends: list[int], eos: int, size: int, seed: str
) -> dict[str, Any]:
    """Times of a case, and its texts with whether they are whole."""
    compiles, masks, texts = [], [], []
    for number in range(_WALKS):
        started = time.perf_counter()
        matcher = make()
        if number < _COMPILES:
            compiles.append(time.perf_counter() - started)
        tokens, seconds = walk(matcher, ends, eos, size, random.Random(f"{seed} {number}"))
        masks += seconds
        texts.append([tokenizer.decode(tokens), matcher.is_complete()])
    return {"compile": compiles, "masks": masks, "texts": texts}


def main() -> None:
    text = Path(sys.argv[1], "tokenizer.json").read_text()
    eos, tokenizer, cases = int(sys.argv[2]), Tokenizer.from_str(text), json.load(sys.stdin)
    size = tokenizer.get_vocab_size()
    ends = [token for each in _ENDS if (token := tokenizer.token_to_id(each)) is not None]
    names = [name for name, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    info = xgrammar.TokenizerInfo(names, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[eos])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    vocabulary = LLTokenizer(text, eos_token=[eos])

    def by_xgrammar(case: dict[str, Any]) -> Matcher:
        if "regex" in case:
            return XgrammarMatcher(compiler.compile_regex(case["regex"]))
        return XgrammarMatcher(compiler.compile_json_schema(case["schema"], any_whitespace=True, strict_mode=False))

    def by_llguidance(case: dict[str, Any]) -> Matcher:
        return LlguidanceMatcher(vocabulary, case["lark"])

    result: dict[str, Any] = {}
    for engine, build in (("llguidance", by_llguidance), ("xgrammar", by_xgrammar)):
        found: list[dict[str, Any]] = []
        for case in cases:
            try:
                found.append(measure(lambda: build(case), tokenizer, ends, eos, size, case["name"]))  # noqa: B023
            except Exception as error:  # whatever an engine raises for what it does not know
                found.append({"error": f"{type(error).__name__}: {error}"[:200]})
        result[engine] = {"version": version(engine), "cases": found}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
