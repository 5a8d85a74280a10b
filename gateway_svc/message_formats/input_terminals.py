"""The grammar of a custom tool's text as one terminal of the grammar of a turn.

llguidance's lexer takes the longest terminal and does not return to a shorter one. Within a string of JSON several
terminals of a text may begin alike, with a backslash, and any may go on with one. So the rules of the client's grammar
become terminals, which llguidance joins into one, with the text that closes the call.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from gateway_svc.message_formats.json_regex import UnsupportedRegex, escaped_regex_of, json_escape
from gateway_svc.message_formats.lark import escaped_regex, quoted
from gateway_svc.message_formats.parameter_values import UnsupportedParameters

_DEFINITION = re.compile(r"^[ \t]*[?!]?(?P<name>[A-Za-z_](?:\w|-(?!>))*)[ \t]*:(?!:)", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*%(?P<kind>\w+)(?P<rest>[^\n]*)$", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|//[^\n]*|\#[^\n]*)+)
    |(?P<range>"(?:[^"\\\n]|\\.)"\s*\.\.\s*"(?:[^"\\\n]|\\.)")
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<alias>->\s*\w+)
    |(?P<name>[A-Za-z_](?:\w|-(?!>))*)
    |~\s*(?P<count>\d+)(?:\s*\.\.\s*(?P<most>\d+))?
    |(?P<operator>\{\s*\d*\s*,?\s*\d*\s*\}|[|*+?()&])
    |(?P<optional>[\[\]])""",
    re.VERBOSE,
)
_REGEX = re.compile(r"/(?P<body>.*)/(?P<flags>[a-z]*)", re.DOTALL)

_COMMON: Mapping[str, str] = {
    "DIGIT": "/[0-9]/",
    "HEXDIGIT": "/[0-9a-fA-F]/",
    "INT": "/[0-9]+/",
    "SIGNED_INT": "/[+-]?[0-9]+/",
    "DECIMAL": r"/[0-9]+\.[0-9]*|\.[0-9]+/",
    "_EXP": "/[eE][+-]?[0-9]+/",
    "FLOAT": r"/[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?/",
    "SIGNED_FLOAT": r"/[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)/",
    "NUMBER": r"/([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?/",
    "SIGNED_NUMBER": r"/[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?/",
    "ESCAPED_STRING": r'/"([^"\\]|\\.)*"/',
    "LCASE_LETTER": "/[a-z]/",
    "UCASE_LETTER": "/[A-Z]/",
    "LETTER": "/[A-Za-z]/",
    "WORD": "/[A-Za-z]+/",
    "CNAME": "/[_A-Za-z][_A-Za-z0-9]*/",
    "WS_INLINE": r"/[ \t]+/",
    "WS": r"/[ \t\f\r\n]+/",
    "CR": r"/\r/",
    "LF": r"/\n/",
    "NEWLINE": r"/(\r?\n)+/",
    "SH_COMMENT": r"/#[^\n]*/",
    "CPP_COMMENT": r"/\/\/[^\n]*/",
    "SQL_COMMENT": r"/--[^\n]*/",
    "C_COMMENT": r"/\/\*[^*]*\*+([^\/*][^*]*\*+)*\//",
}
"""Terminals of Lark's module `common`, as regular expressions."""


def input_terminals(grammar: str, name: str, tool: str, closing: str, *, is_json: bool) -> dict[str, str]:
    """The terminals of a grammar in Lark's syntax, by their names, of which each begins with `name`. That of this name
    is the text with `closing` after it, if that is not empty. With `is_json` the text stands in a string of JSON, else
    it has no `closing`.

    The grammar is one that compiles. Raises UnsupportedParameters where it has what no terminal has: rules that contain
    themselves, `%ignore`, and llguidance's own extensions.
    """
    rewriting = _Rewriting(name, f"the grammar of {tool}", is_json=is_json)
    rules = rewriting.rules(grammar)
    text = rewriting.names["start"]
    if not is_json and closing:  # the first such tag ends the text
        rules[f"{name}_TEXT"] = f"{text} & ~/(?s:.*){escaped_regex(closing.strip())}(?s:.*)/"
        text = f"{name}_TEXT"
    return {**rules, name: f"{text} {quoted(closing)}" if closing else text}


class _Rewriting:
    def __init__(self, prefix: str, where: str, *, is_json: bool) -> None:
        self.names: dict[str, str] = {}
        """The names of terminals by those in the grammar."""
        self._prefix = prefix
        self._where = where
        self._is_json = is_json

    def rules(self, grammar: str) -> dict[str, str]:
        """Raises UnsupportedParameters."""
        bodies = {**self._imported(grammar), **_definitions(_DIRECTIVE.sub("", grammar))}
        if "start" not in bodies:  # it has attributes
            raise self._unsupported("the rule start is")
        # Names of rules and of terminals may differ in nothing but their case.
        self.names = {one: f"{self._prefix}_{'T' if one.isupper() else 'R'}_{one.upper()}" for one in bodies}
        references: dict[str, set[str]] = {}
        rules = {}
        for one, body in bodies.items():
            references[one] = set()
            rules[self.names[one]] = "".join(self._body(body, references[one]))
        if _has_cycle(references):
            raise self._unsupported("rules that contain themselves are")
        return rules

    def _imported(self, grammar: str) -> dict[str, str]:
        imported = {}
        for directive in _DIRECTIVE.finditer(grammar):
            found = re.fullmatch(r"\s*common\s*(?:\.\s*(\w+)|\(([\w\s,]+)\))\s*(?://.*)?", directive["rest"])
            if directive["kind"] != "import" or found is None:
                raise self._unsupported(f"%{directive['kind']} is")
            for one in re.findall(r"\w+", found[1] or found[2]):
                if one not in _COMMON:
                    raise self._unsupported(f"common.{one} is")
                imported[one] = _COMMON[one]
        return imported

    def _body(self, body: str, references: set[str]) -> Iterator[str]:
        at = 0
        while at < len(body):
            token = _TOKEN.match(body, at)
            if token is None:
                raise self._unsupported(f"{body[at : at + 10]!r} is")
            at = token.end()
            match token.lastgroup:
                case "space":
                    yield "\n" if "\n" in token[0] else " "
                case "alias":
                    pass
                case "name":
                    if token[0] not in self.names:  # a rule with attributes
                        raise self._unsupported(f"the rule {token[0]} is")
                    references.add(token[0])
                    yield self.names[token[0]]
                case "count" | "most":
                    yield f"{{{token['count']},{token['most'] or token['count']}}}"
                case "optional":
                    yield "(" if token[0] == "[" else ")?"
                case "operator":
                    yield token[0]
                case kind:
                    yield self._literal(token[0], kind) if self._is_json else token[0]

    def _literal(self, text: str, kind: str | None) -> str:
        """A literal within a string of JSON."""
        if kind == "string":
            return self._string(text)
        flags = ""
        if kind == "range":
            first, last = (_value(end) for end in re.findall(r'"(?:[^"\\]|\\.)"', text))
            body = f"[{escaped_regex(first)}-{escaped_regex(last)}]"
        else:
            found = _REGEX.fullmatch(text)
            assert found is not None, "it is a regular expression"
            body, flags = found["body"], found["flags"]
        try:
            if "x" in flags:
                raise UnsupportedRegex("the flag x is not supported")
            return f"/{escaped_regex_of(body, matches_line_breaks='s' in flags)}/{flags}"
        except UnsupportedRegex as error:
            raise UnsupportedParameters(f"{self._where}: {error}") from None

    def _string(self, text: str) -> str:
        value = _value(text.removesuffix("i"))
        if not text.endswith("i"):
            return quoted(json_escape(value))
        # An escape has one case.
        parts = (
            quoted(json_escape(part)) if json_escape(part) != part else f"{quoted(part)}i" for part in _runs(value)
        )
        return f"({' '.join(parts)})" if value else text

    def _unsupported(self, what: str) -> UnsupportedParameters:
        return UnsupportedParameters(f"{self._where}: {what} not supported in the grammar of a custom tool")


def _definitions(grammar: str) -> dict[str, str]:
    """The bodies of rules and terminals, by their names."""
    found = list(_DEFINITION.finditer(grammar))
    ends = [*(each.start() for each in found), len(grammar)][1:]
    return {each["name"]: grammar[each.end() : end].strip() for each, end in zip(found, ends, strict=True)}


def _value(literal: str) -> str:
    """The text of a literal in quotes."""
    return str(json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", literal)))


def _runs(text: str) -> Iterable[str]:
    """The text in parts without special characters, and single ones."""
    return re.findall(r'[^"\\\x00-\x1f]+|["\\\x00-\x1f]', text)


def _has_cycle(references: Mapping[str, Iterable[str]]) -> bool:
    done = set[str]()
    left = dict(references)
    while left:
        ready = [name for name, used in left.items() if done.issuperset(used)]
        if not ready:
            return True
        done.update(ready)
        for name in ready:
            del left[name]
    return False
