"""Grammars compile within limits that count work: every process accepts the same ones, and none ends the process."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, models

import svc_common
from svc_common.grammars import (
    MAX_GRAMMAR_BYTES,
    GrammarTooComplex,
    InvalidGrammar,
    UnsupportedTokenizer,
    compile_grammar,
    exceeds_limit,
    grammar_threads,
    load_grammar_tokenizer,
)
from tiny_model import EOS, tiny_tokenizer

DEEPEST = MAX_GRAMMAR_BYTES // 16


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_grammar_tokenizer(tiny_tokenizer().to_str(), [EOS])


def _compile(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiled as services do it, on a thread with a large stack."""
    with grammar_threads(1, "test") as threads:
        return threads.submit(compile_grammar, tokenizer, grammar).result()


def _schema(schema: Any) -> str:
    return f"start: %json {json.dumps(schema)}"


def _allowed(matcher: LLMatcher) -> set[int]:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return {token for token in range(mask.bit_length()) if mask >> token & 1}


def test_a_matcher_accepts_what_its_grammar_does(tokenizer: LLTokenizer) -> None:
    matcher = _compile(tokenizer, _schema({"type": "integer"}))
    assert matcher.consume_tokens(tokenizer.tokenize_str("17"))
    assert matcher.is_accepting()
    assert not matcher.consume_tokens(tokenizer.tokenize_str("x"))


def test_the_text_ends_with_any_end_of_text_token() -> None:
    tokenizer = load_grammar_tokenizer(tiny_tokenizer().to_str(), [0, EOS])
    matcher = _compile(tokenizer, 'start: "a"')
    assert not {0, EOS} & _allowed(matcher)
    assert matcher.consume_tokens(tokenizer.tokenize_str("a"))
    assert _allowed(matcher) == {0, EOS}


def test_an_end_of_text_token_that_the_tokenizer_lacks_is_left_out() -> None:
    size = tiny_tokenizer().get_vocab_size()
    tokenizer = load_grammar_tokenizer(tiny_tokenizer().to_str(), [size, EOS, 2**32 - 1], vocab_size=size + 50)
    matcher = _compile(tokenizer, 'start: "a"')
    assert matcher.consume_tokens(tokenizer.tokenize_str("a"))
    assert _allowed(matcher) == {EOS}


def test_control_tokens_and_tokens_beyond_the_tokenizers_are_no_text() -> None:
    size = tiny_tokenizer().get_vocab_size()
    tokenizer = load_grammar_tokenizer(tiny_tokenizer().to_str(), [EOS], vocab_size=size + 50)
    assert _allowed(_compile(tokenizer, r"start: /(.|\n)*/")) <= {EOS, *range(3, size)}


def test_a_tokenizer_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(UnsupportedTokenizer, match="no end-of-text token"):
        load_grammar_tokenizer(tiny_tokenizer().to_str(), [])
    with pytest.raises(UnsupportedTokenizer, match="no end-of-text token"):
        load_grammar_tokenizer(tiny_tokenizer().to_str(), [tiny_tokenizer().get_vocab_size()])
    with pytest.raises(UnsupportedTokenizer, match="vocab"):
        load_grammar_tokenizer(tiny_tokenizer().to_str(), [EOS], vocab_size=8)
    with pytest.raises(UnsupportedTokenizer):
        load_grammar_tokenizer(Tokenizer(models.WordLevel({"a": 0}, "a")).to_str(), [0])
    damaged = {"type": "Precompiled", "precompiled_charsmap": ""}  # tokenizers panics
    with pytest.raises(UnsupportedTokenizer, match="cannot be applied"):
        load_grammar_tokenizer(json.dumps({**json.loads(tiny_tokenizer().to_str()), "normalizer": damaged}), [EOS])


def test_the_default_models_tokenizer_can_be_used() -> None:
    path = Path(svc_common.__path__[0]) / "default_model" / "tokenizer.json.xz"
    tokenizer = load_grammar_tokenizer(lzma.decompress(path.read_bytes()).decode(), [2])
    matcher = _compile(tokenizer, _schema({"enum": ["red", "green"]}))
    assert matcher.consume_tokens(tokenizer.tokenize_str('"green"'))


@pytest.mark.parametrize(
    "grammar",
    ["", "begin: /a/", "start: /(/", "start: %json {", _schema({"type": "colour"}), "start: b", "start: /a/ \0"],
    ids=["empty", "no start", "regex", "json", "schema", "rule", "nul"],
)
def test_what_is_no_grammar_is_invalid(tokenizer: LLTokenizer, grammar: str) -> None:
    with pytest.raises(InvalidGrammar) as raised:
        _compile(tokenizer, grammar)
    assert not isinstance(raised.value, GrammarTooComplex)


QUOTING = {
    "rule": "start: panic",
    "special token": "start: <|too many|>",
    "regex": "start: /too many(/",
    "regex that quotes": 'start: /" (in regex): too many(/',
    "pattern": _schema({"type": "string", "pattern": "max is (?=a)"}),
    "pattern of several lines": _schema({"type": "string", "pattern": "(\nerror: too many"}),
    "type": _schema({"type": "panic"}),
    "format": _schema({"format": "too large", "type": "string"}),
    "reference": _schema({"$ref": "#/panic"}),
    "property": _schema({"properties": {"too many": False}, "required": ["too many"], "type": "object"}),
    "disjoint": _schema({"type": "object", "patternProperties": {"^panic": {}, "b": {}}}),
    "import": "%import panic.x\nstart: x",
    "another line": 'start: a "too many"',
}


@pytest.mark.parametrize("kind", QUOTING)
def test_words_of_the_grammar_in_an_error_do_not_make_it_one_of_limits(tokenizer: LLTokenizer, kind: str) -> None:
    with pytest.raises(InvalidGrammar) as raised:
        _compile(tokenizer, QUOTING[kind])
    assert not isinstance(raised.value, GrammarTooComplex), str(raised.value)


LIMIT_ERRORS = [
    "panic: assertion failed: too deep",
    "lexer error: too many states: 20001",
    "parser error: Too many items (limit 3000; mask); try avoiding single-byte/short lexemes",
    "Parser Error: Current row has 405 items; max is 400; consider making your grammar left-recursive",
    "at 1(8): failed to compile JSON schema: schema too large",
    'invalid regex "((a))" (in regex): regex parse error:\n    ((a))\nerror: exceed the maximum number of nested',
    'failed to parse "%json": recursion limit exceeded at line 1 column 1145',
    "lexer precomputation failed; either increase limits.initial_lexer_fuel",
    "grammar size (number of symbols) too big (limit for this grammar: 100000)",
]


@pytest.mark.parametrize("error", LIMIT_ERRORS)
def test_errors_about_limits(error: str) -> None:
    assert exceeds_limit(error)


def _rules(first: str, rule: str, last: str) -> str:
    """A chain in which each rule is the next one, as deep as the limit of bytes allows."""
    lines = [first]
    while sum(map(len, lines)) + len(lines) + 64 < MAX_GRAMMAR_BYTES and len(lines) < DEEPEST:
        lines.append(rule.format(len(lines), len(lines) + 1))
    return "\n".join([*lines, last.format(len(lines))])


HOSTILE = {
    "bytes": "start: /" + "a" * MAX_GRAMMAR_BYTES + "/",
    "parentheses": "start: " + "(" * 5000 + '"a"' + ")" * 5000,
    "groups": "start: /" + "(a" * 5000 + ")*" * 5000 + "/",
    "objects": "start: %json " + '{"items":' * 5000 + "{}" + "}" * 5000,
    "combinations": _schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(8)]} for i in range(8)]}
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_grammar_beyond_the_limits_is_too_complex(tokenizer: LLTokenizer, kind: str) -> None:
    with pytest.raises(GrammarTooComplex):
        _compile(tokenizer, HOSTILE[kind])


DEEP = {
    "rules": _rules("start: a1", "a{}: a{}", 'a{}: "a"'),
    "rules with text": _rules("start: a1", 'a{}: "x" a{}', 'a{}: "a"'),
    "terminals": _rules("start: A1", 'A{}: "x" A{}', 'A{}: "a"'),
    "references": _rules(
        'start: %json {{"$ref":"#/$defs/a1","$defs":{{'.replace("{{", "{"),
        '"a{}":{{"$ref":"#/$defs/a{}"}},',
        '"a{}":{{"type":"string"}}}}}}',
    ),
}


@pytest.mark.parametrize("kind", DEEP)
def test_the_deepest_grammars_do_not_exhaust_the_stack(tokenizer: LLTokenizer, kind: str) -> None:
    try:
        matcher = _compile(tokenizer, DEEP[kind])
    except GrammarTooComplex:
        return
    assert _allowed(matcher)
