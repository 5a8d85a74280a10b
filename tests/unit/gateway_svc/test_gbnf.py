"""GBNF grammars as Lark grammars: the texts that match, and errors."""

import pytest
from llguidance import LLTokenizer

from gateway_svc.gbnf import InvalidGbnf, gbnf_to_lark
from svc_common.grammars import compile_grammar, load_grammar_tokenizer
from tiny_model import EOS, tiny_tokenizer

# The example of llama.cpp's documentation, shortened.
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws  # may be empty

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""

GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    (JSON, ['{"a": [1, 2.5, {}], "b\\u00e9": null}', "{}"], ["[]", '{"a"}', '{"a":  1}']),
    (r'root ::= "\u0041\x42\[\]\U0001F600é"', ["AB[]\U0001f600é"], ["AB"]),
    (r'root ::= "\"\\\n\t\r"', ['"\\\n\t\r'], []),
    ('root ::= "a\nb"', ["a\nb"], ["ab"]),
    (r"root ::= [\u0041-\u0043]+", ["ABCA"], ["D", ""]),
    (r"root ::= [^\n\]\[/]", ["a", "^"], ["\n", "]", "[", "/"]),
    ("root ::= [-a] [a-] [&&]", ["-a&", "a-&"], ["b-&", "--a"]),
    ("root ::= [a^~]", ["a", "^", "~"], ["b"]),
    ("root ::= [é-ü]", ["ê"], ["e"]),
    ("root ::= . .", ["ab", "\n\n"], ["a"]),
    ('root ::= start\nstart ::= "a"', ["a"], ["b"]),
    ('root ::= fooBar foo-bar foo_bar\nfooBar ::= "x"\nfoo-bar ::= "y"\nfoo_bar ::= "z"', ["xyz"], ["xxx"]),
    ('root ::= 1a\r\n1a ::= "x"\r\n', ["x"], [""]),
    ('root ::= "<|im_end|>"? if\nif ::= "x"', ["x"], []),
    ('root ::= ("a" | "b")? "c" |\n  "d"', ["ac", "bc", "c", "d"], ["a", "cd"]),
    ('root ::= a{2} b{1,} c{0,2} "d"*\na ::= "a"\nb ::= "b"\nc ::= "c"', ["aab", "aabbbccdd"], ["ab", "aabccc"]),
    ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x"]),
    ('root ::= ("a"+){2} ("b"*)? "c"', ["aac", "aaabc"], ["ac"]),
    ('root ::= r2 r1\nr2 ::= "a"\nr1 ::= "b"', ["ab"], ["ba", "aa"]),
]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    """The tiny vocabulary."""
    return load_grammar_tokenizer(tiny_tokenizer().to_str(), [EOS])


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS)
def test_the_same_texts_match(grammar: str, good: list[str], bad: list[str], vocabulary: LLTokenizer) -> None:
    matcher = compile_grammar(vocabulary, gbnf_to_lark(grammar))
    for text in (*good, *bad):
        again = matcher.deep_copy()
        token_ids = vocabulary.tokenize_str(text)
        matches = again.try_consume_tokens(token_ids) == len(token_ids) and again.is_accepting()
        assert matches is (text in good), text


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "root"),
        ('x ::= "a"', "root"),
        ("root ::= x", "x"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ('root = "a"', "::="),
        ('root ::= "a', "end of input"),
        ('root ::= "\\', "escape"),
        (r'root ::= "\uD800"', "character"),
        (r'root ::= "\xZZ"', "escape"),
        ("root ::= [a", "end of input"),
        ('root ::= ("a"', r"'\)'"),
        ('root ::= "a"{x}', "integer"),
        ('root ::= !"a"', "name"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_place(grammar: str, words: str) -> None:
    with pytest.raises(InvalidGbnf, match=words):
        gbnf_to_lark(grammar)
