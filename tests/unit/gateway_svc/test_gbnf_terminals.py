"""Parts of GBNF grammars that become terminals: fewer items to parse, and the same texts match."""

import lzma
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from llguidance import LLTokenizer

import svc_common
from gateway_svc import gbnf
from gateway_svc.character_sets import ALL, complement, overlap, union
from gateway_svc.constraints import UnvalidatedConstraint, checked_grammar
from gateway_svc.field_paths import Field
from gateway_svc.gbnf import gbnf_to_lark
from svc_common.grammars import compile_grammar, load_grammar_tokenizer


@pytest.fixture(scope="module")
def large_vocabulary() -> LLTokenizer:
    """That of the default model: 49,152 tokens."""
    path = Path(svc_common.__path__[0]) / "default_model" / "tokenizer.json.xz"
    return load_grammar_tokenizer(lzma.decompress(path.read_bytes()).decode(), [2])


# As llama.cpp writes schemas, with a recursion.
SCHEMA = r"""
root ::= "{" name-kv ("," tags-kv)? ("," child-kv)? "}" space
name-kv ::= "\"name\"" space ":" space string
tags-kv ::= "\"tags\"" space ":" space "[" space (string ("," space string)*)? "]" space
child-kv ::= "\"child\"" space ":" space root
string ::= "\"" char* "\"" space
char ::= [^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})
space ::= | " " | "\n" [ \t]{0,20}
"""

FREE_TEXT = [
    ('root ::= [^a]+ "a"', "hello there, "),
    (r'root ::= "\"" ([^"\\] | "\\" ["\\n])* "\""', '"hello there, '),
    ('root ::= "{" ("\\"" char* "\\"" ":" root)* "}"\nchar ::= [^"]', '{"hello there, '),
    (SCHEMA, '{"name":"hello there, '),
    ('root ::= ([A-Za-z]+ " ")* "."', "hello there "),
]


@pytest.mark.parametrize(("grammar", "text"), FREE_TEXT)
def test_free_text_is_within_the_limits_of_a_large_vocabulary(
    grammar: str, text: str, large_vocabulary: LLTokenizer
) -> None:
    checked = checked_grammar(UnvalidatedConstraint(Field.GBNF, grammar), large_vocabulary)
    matcher = compile_grammar(large_vocabulary, checked)
    for token in large_vocabulary.tokenize_str(text):
        matcher.compute_bitmask()
        assert matcher.consume_token(token)
    matcher.compute_bitmask()
    assert not matcher.is_error()


UNCHANGED = [
    'root ::= [a-z]+ "b" root | "x"',  # "ab" may end or go on
    'root ::= "a" [a-z]* root | ";"',
    'root ::= ("\\"" [^"]* "\\"" | "\\"" [0-9] "!") root | "x"',  # two that begin alike
    'root ::= ("\\"" [^"]* "\\"" | "\\"key\\":") root | "x"',
    'root ::= ("\\"" [^"]* "\\"" | .) root | "x"',
]


@pytest.mark.parametrize("grammar", UNCHANGED)
def test_parts_whose_end_is_not_certain_are_no_terminals(grammar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gbnf_to_lark(grammar)
    monkeypatch.setattr(gbnf, "merge_characters", lambda *_: set())
    assert gbnf_to_lark(grammar) == before


def test_a_text_that_is_also_a_literal_is_both(vocabulary: LLTokenizer) -> None:
    grammar = gbnf_to_lark('root ::= ("\\"" [^"]* "\\"" "x" | "\\"red\\"" "y") root | "."')
    assert "{0,}" in grammar
    texts = ['"red"x.', '"red"y.', '"blue"x"red"y.', '"blue"y.']
    assert _matches(grammar, texts, vocabulary) == [True, True, True, False]


def _matches(grammar: str, texts: Sequence[str], vocabulary: LLTokenizer) -> list[bool]:
    """Whether a grammar takes each of these whole texts."""
    compiled, found = compile_grammar(vocabulary, grammar), []
    for text in texts:
        matcher, token_ids = compiled.deep_copy(), vocabulary.tokenize_str(text)
        found.append(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())
    return found


LETTERS = "abcdefgh"


@dataclass(frozen=True)
class Part:
    """A part of a random grammar in GBNF, the regular expression for the same texts, and how one of them is made."""

    gbnf: str
    regex: str
    example: Callable[[], str]


class RandomGrammar:
    """A grammar over LETTERS."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rules: list[str] = []
        self.whole = self._sequence(2)
        self.gbnf = "\n".join([f"root ::= {self.whole.gbnf}", *self.rules])

    def texts(self, count: int) -> list[str]:
        """Some that match, and some with one letter more or less."""
        made = [self.whole.example() for _ in range(count)]
        for text in list(made):
            place = self.rng.randint(0, len(text))
            made += [text[:place] + self.rng.choice(LETTERS) + text[place:], text[:place] + text[place + 1 :]]
        return made

    def _sequence(self, depth: int) -> Part:
        parts = [self._part(depth) for _ in range(self.rng.choice([1, 2, 2, 3]))]
        return Part(
            " ".join(part.gbnf for part in parts),
            "".join(part.regex for part in parts),
            lambda: "".join(part.example() for part in parts),
        )

    def _part(self, depth: int) -> Part:
        rng, kind = self.rng, self.rng.randrange(7 if depth else 2)
        if kind == 0:
            text = "".join(rng.choice(LETTERS) for _ in range(rng.choice([1, 1, 2])))
            return Part(f'"{text}"', text, lambda: text)
        if kind == 1:
            letters = rng.sample(LETTERS, rng.choice([1, 2, 3]))
            characters = "".join(letters)
            return Part(f"[{characters}]", f"[{characters}]", lambda: rng.choice(letters))
        if kind == 2:
            choices = [self._sequence(depth - 1) for _ in range(2)]
            return Part(
                f"({choices[0].gbnf} | {choices[1].gbnf})",
                f"(?:{choices[0].regex}|{choices[1].regex})",
                lambda: rng.choice(choices).example(),
            )
        inner = self._sequence(depth - 1)
        if kind == 3:
            self.rules.append(f"r{len(self.rules)} ::= {inner.gbnf}")
            return Part(f"r{len(self.rules) - 1}", f"(?:{inner.regex})", inner.example)
        count, least, most = rng.choice([("*", 0, 3), ("+", 1, 3), ("*", 0, 3), ("{2}", 2, 2)])
        return Part(
            f"({inner.gbnf}){count}",
            f"(?:{inner.regex}){count}",
            lambda: "".join(inner.example() for _ in range(rng.randint(least, most))),
        )


def test_random_grammars_match_what_they_did(vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that was taken or refused rightly when each character was a terminal is so still."""
    rng, num_checked = random.Random(8), Counter[bool]()
    for _ in range(250):
        case = RandomGrammar(rng)
        merged = gbnf_to_lark(case.gbnf)
        with monkeypatch.context() as patched:
            patched.setattr(gbnf, "merge_characters", lambda *_: set())
            plain = gbnf_to_lark(case.gbnf)
        if merged == plain:
            continue
        texts = case.texts(5)
        found = zip(texts, _matches(plain, texts, vocabulary), _matches(merged, texts, vocabulary), strict=True)
        for text, before, now in found:
            is_right = re.fullmatch(case.whole.regex, text) is not None
            if before is is_right:
                assert now is is_right, (case.gbnf, text)
                num_checked[is_right] += 1
    assert min(num_checked[True], num_checked[False]) > 50


def test_sets_of_characters() -> None:
    assert union([(5, 6)], [(1, 2), (3, 3)]) == ((1, 3), (5, 6))
    assert complement(((0, 9), (12, 0x10FFFF))) == ((10, 11),)
    assert complement(ALL) == ()
    assert ALL == ((0, 0xD7FF), (0xE000, 0x10FFFF))
    assert overlap(((1, 3), (8, 9)), ((4, 8),))
    assert not overlap(((1, 3), (8, 9)), ((4, 7), (10, 11)))
