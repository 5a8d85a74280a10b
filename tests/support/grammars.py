"""Grammars over the tiny tokenizer, with a second opinion on what matches them."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import LlamaConfig

from llama_models import SIZES
from svc_common.grammars import load_grammar_tokenizer
from tiny_model import EOS, tiny_tokenizer
from worker_svc.grammar import GrammarCompiler

VOCAB = 288
"""Of a tiny model's logits: more than the tokenizer has, and a multiple of 32."""
TOKENIZER = tiny_tokenizer()


def config_for_grammars() -> LlamaConfig:
    """A tiny model with logits for the tiny tokenizer."""
    return LlamaConfig(**SIZES | {"vocab_size": VOCAB})


def tiny_grammars(vocab_size: int = VOCAB) -> GrammarCompiler:
    return GrammarCompiler(partial(load_grammar_tokenizer, TOKENIZER.to_str(), [EOS]), vocab_size, num_threads=2)


def text_of(tokens: Sequence[int]) -> bytes:
    """The bytes of tokens, without the last one if that is end-of-text."""
    shown = list(tokens[:-1]) if tokens and tokens[-1] == EOS else list(tokens)
    alphabet = {character: byte for byte, character in _byte_characters().items()}
    return bytes(alphabet[character] for token in shown for character in TOKENIZER.id_to_token(token) or "")


def _byte_characters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


@dataclass(frozen=True)
class GrammarCase:
    """A grammar and whether a complete text matches it, by other code."""

    grammar: str
    matches: Callable[[str], bool]


def _schema(schema: Any, check: Callable[[Any], bool]) -> GrammarCase:
    return GrammarCase(f"start: %json {json.dumps(schema)}", lambda text: check(json.loads(text)))


def _regex(pattern: str) -> GrammarCase:
    return GrammarCase(f"start: /{pattern}/", lambda text: re.fullmatch(pattern, text) is not None)


CASES: dict[str, GrammarCase] = {
    "date": _regex(r"[0-9]{4}-[01][0-9]-[0-3][0-9]"),
    "words": _regex(r"(hello|world|well)( (hello|world))*\."),
    "hex": _regex(r"0x[0-9a-f]+;"),
    "two letters": _regex(r"[é½你]{1,4}!"),
    "choice": GrammarCase('start: "yes" | "no" | "perhaps"', lambda text: text in ("yes", "no", "perhaps")),
    "recursion": GrammarCase('start: a\na: "(" a ")" | "x"', lambda text: re.fullmatch(r"\(*x\)*", text) is not None),
    "counted": GrammarCase(
        'start: letters "!"\nletters[max_tokens = 3]: /[a-z]*/',
        lambda text: re.fullmatch(r"[a-z]*!", text) is not None and len(TOKENIZER.encode(text).ids) <= 4,
    ),
    "enum": _schema({"enum": ["red", 7, None, True]}, lambda value: value in ("red", 7, None, True)),
    "integer": _schema({"type": "integer", "minimum": 10, "maximum": 99}, lambda value: 10 <= value <= 99),
    "object": _schema(
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"type": "null"}, "maxItems": 2}},
            "required": ["a"],
            "additionalProperties": False,
        },
        lambda value: isinstance(value["a"], bool) and set(value) <= {"a", "b"} and len(value.get("b", [])) <= 2,
    ),
    "any": _schema({}, lambda value: True),
}


def is_prefix(grammars: GrammarCompiler, case: GrammarCase, tokens: Sequence[int]) -> bool:
    """Whether a fresh matcher accepts all these tokens."""
    return grammars.matcher(case.grammar).num_allowed(tokens) == len(tokens)
