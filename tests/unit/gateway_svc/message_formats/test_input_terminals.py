"""Grammars of custom tools as terminals: they match the same texts, also within a string of JSON."""

import json
import random
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway_svc.message_formats.input_terminals import _COMMON, input_terminals
from gateway_svc.message_formats.parameter_values import UnsupportedParameters

BYTES = LLTokenizer("byte")
END = "\x02"

GRAMMARS: dict[str, tuple[str, list[str]]] = {
    "quotes and backslashes": (r'start: /[^"]*/ "\"" "\\" /.+/', ['"\\a', '\n\\"\\"', 'a"\\{']),
    "letters of either case": ('start: "a\\n"i "\\n"? /[^a]/', ["A\n\n", 'a\n"', "a\n\nb"]),
    "a terminal that another one follows": (
        'start: /(?s:.)b\\n*/ x\nx: ("a" | /\\x22/)+ -> y\n',
        ["\nb\na", '"b""a', "\x01ba"],
    ),
    "counts and options": ('start: A{2,3} ["b"]\nA: "\\"" | "a".."b"\n', ['""', 'a"b', "abab"]),
    "terminals of the module common": (
        "start: WS? ESCAPED_STRING NEWLINE*\n%import common (WS, ESCAPED_STRING)\n%import common.NEWLINE\n",
        ['""', '\n "a\\""\n', '"é"\n\n'],
    ),
    "classes": (r'start: /[\s\W]+/ "a"~1..2 "b"', [" ab", '"\\\naab', "\t{ab"]),
    "classes with brackets": (r'start: /\\"\t[\\\]]*/', ['\\"\t', '\\"\t\\]', '\\"\t\\\\']),
    "properties": (r"start: /[^\p{L}]*a/i", ["a", '"\\A', "1\n a"]),
    "groups": (r"start: /a(?s).(?-s:.)b|(?:.|\n){2}c/", ["a\n\tb", 'a""b', "\n\nc"]),
    "comments": ('?start: y | z // c: d\ny: "a"\n  | "\\\\" z\n!z: /["b]/s\n', ["a", '\\"', "b"]),
    "a patch": (
        'start: "*** Begin" LF line+ "*** End" LF?\nline: ("+" | "-") /(.*)/ LF -> line\n%import common.LF\n',
        ['*** Begin\n+a\\"b\n*** End', "*** Begin\n-\n+*** End\n*** End\n"],
    ),
}


@cache
def matcher_of(grammar: str) -> LLMatcher:
    """At the beginning of a text."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def admits(grammar: str, text: str) -> bool:
    matcher, token_ids = matcher_of(grammar), BYTES.tokenize_str(text)
    if matcher.validate_tokens(token_ids) < len(token_ids):
        return False
    assert matcher.consume_tokens(token_ids)
    is_whole = bool(matcher.is_accepting())
    assert matcher.reset()
    return is_whole


def one_terminal(grammar: str, opening: str, closing: str, *, is_json: bool) -> str:
    rules = input_terminals(grammar, "IN", "f", closing, is_json=is_json)
    assert all(name.startswith("IN") for name in rules)
    return f"start: {json.dumps(opening)} IN\n" + "".join(f"{name}: {body}\n" for name, body in rules.items())


@pytest.mark.parametrize(("grammar", "texts"), GRAMMARS.values(), ids=GRAMMARS)
def test_the_same_texts_match_within_json_and_outside(grammar: str, texts: list[str]) -> None:
    rng = random.Random(grammar)
    drawn = ["".join(rng.choice('"\\\naabb \t\x01\x1c{é') for _ in range(rng.randrange(7))) for _ in range(150)]
    # Of the grammar as it is, llguidance takes the longest terminal: as one terminal it has all of its texts.
    plain = one_terminal(grammar, "", END, is_json=False)
    in_json = one_terminal(grammar, '{"input": "', '"}', is_json=True)
    in_tags = one_terminal(grammar, "<p>\n", "\n</p>\n", is_json=False)
    assert all(admits(plain, text + END) for text in texts)
    for text in [*texts, *drawn]:
        expected = admits(plain, text + END)
        assert admits(in_json, json.dumps({"input": text}, ensure_ascii=False)) is expected, text
        assert admits(in_tags, f"<p>\n{text}\n</p>\n") is expected, text


def test_a_text_between_tags_does_not_have_the_one_that_closes_it() -> None:
    grammar = one_terminal("start: /.*/", "<p>", "</p>", is_json=False)
    assert admits(grammar, "<p>a</p></p>") is False
    assert admits(grammar, "<p>a</</p>")


@pytest.mark.parametrize("name", _COMMON)
def test_terminals_of_the_module_common_are_those_of_llguidance(name: str) -> None:
    rng = random.Random(name)
    comments = {"C_COMMENT": "/*a\n", "CPP_COMMENT": "/a\n", "SH_COMMENT": "#a\n", "SQL_COMMENT": "-a\n"}
    letters = comments.get(name, '"\\\n' if name == "ESCAPED_STRING" else "09aZ_.eE+-\r\n\t \f")
    ours, theirs = f"start: {_COMMON[name]}\n", f"start: {name}\n%import common.{name}\n"
    texts = ["".join(rng.choice(letters) for _ in range(rng.randrange(6))) for _ in range(150)]
    for text in [*texts, *(f"/*{text}*/" for text in texts)]:
        assert admits(ours, text) is admits(theirs, text), text


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        ('start: "(" start ")" | "a"', "contain themselves"),
        ('start: a\na: b\nb: "x" a?', "contain themselves"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("start: A\n%import common.NO_SUCH -> A", "%import"),
        ("start: NO_SUCH\n%import common.NO_SUCH", "common.NO_SUCH"),
        ("start: %json {}", "%json"),
        ("start: a\na[lazy]: /x/", "the rule a"),
        ("start[lazy]: /x/", "the rule start"),
        ("start[max_tokens=3]: A\nA: /x/", "the rule start"),
        ("start: <[3]>", "<[3]>"),
        ("start: A & B\nA: /a/\nB: ~/b/", "~/b/"),
        ("start: /[a&&[b]]/", "[a&&[b]"),
        (r"start: /\p{Po}/", r"\p{Po}"),
        ("start: /(?x)a b/", "the flag x"),
        ("start: /a b/x", "the flag x"),
    ],
)
def test_what_is_no_terminal_is_refused_by_name(grammar: str, part: str) -> None:
    with pytest.raises(UnsupportedParameters) as error:
        input_terminals(grammar, "IN", "f", '"', is_json=True)
    assert part in str(error.value)
    assert "the grammar of f" in str(error.value)
