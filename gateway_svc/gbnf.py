"""Grammars in GBNF, the syntax of llama.cpp, to llguidance's Lark syntax: its converter, with all of GBNF's escapes and
names."""

import json
from collections.abc import Iterator

from llguidance.gbnf_to_lark import (
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    LiteralNode,
    Position,
    RegexNode,
    RuleNode,
    RuleRefNode,
    resolve,
)

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


class InvalidGbnf(Exception):  # noqa: N818
    """A text that is not a grammar in GBNF. The text of the error names the place."""


def gbnf_to_lark(text: str) -> str:
    """Raises InvalidGbnf, and RecursionError for parentheses that are nested too deeply."""
    try:
        rules = _Parser().parse(text)
        _rename(rules)
        resolve(rules)
    except RecursionError:
        raise
    except Exception as error:  # the converter raises nothing narrower
        raise InvalidGbnf(str(error)) from None
    return "".join(f"{rule}\n" for rule in sorted(rules.values(), key=lambda rule: rule.order))


class _Parser(GrammarParser):
    """GBNF's escapes are not all Lark's, nor those of regular expressions: characters are decoded and written again."""

    def parse(self, text: str) -> dict[str, RuleNode]:
        self._names: set[str] = set()
        return super().parse(text)

    def _parse_rule(self, pos: Position) -> tuple[RuleNode, Position]:
        rule, after = super()._parse_rule(pos)
        if rule.name in self._names:
            raise GbnfToLarkError(pos, f"Rule {rule.name!r} is there twice")
        self._names.add(rule.name)
        rule.comment = ""
        return rule, after

    def _parse_literal(self, pos: Position) -> tuple[ASTNode, Position]:
        pos = pos.advance()
        text = ""
        while pos.current() != '"':
            character, pos = self._character(pos)
            text += character
        return LiteralNode(json.dumps(text)[1:-1]), pos.advance()

    def _parse_char_class(self, pos: Position) -> tuple[ASTNode, Position]:
        pos = pos.advance()
        text = "["
        if pos.current() == "^":
            text, pos = "[^", pos.advance()
        while pos.current() != "]":
            is_range = pos.current() == "-" and len(text.lstrip("[^")) > 0 and pos.peek(2) != "-]"
            character, pos = self._character(pos)
            is_plain = is_range or (character.isascii() and character.isalnum())
            text += character if is_plain else f"\\x{{{ord(character):X}}}"
        return RegexNode(f"{text}]"), pos.advance()

    def _character(self, pos: Position) -> tuple[str, Position]:
        if pos.peek(2) == "\\":
            raise GbnfToLarkError(pos, "Incomplete escape sequence")
        text, after = self._parse_char(pos)
        if len(text) == 1:
            return text, after
        if text[1] in "xuU":
            code = int(text[2:] or "0", 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise GbnfToLarkError(pos, "Escape sequence of no character")
            return chr(code), after
        return _ESCAPES.get(text[1], text[1]), after


def _rename(rules: dict[str, RuleNode]) -> None:
    """Names that Lark takes and that are still different in upper and lower case; the first rule stays `root`."""
    names = {name: name if name == "root" else f"r{index}" for index, name in enumerate(rules)}
    for node in _nodes(rules):
        if isinstance(node, RuleRefNode):
            if node.name not in names:
                raise InvalidGbnf(f"Rule {node.name!r} not found")
            node.name = names[node.name]
        elif isinstance(node, RegexNode) and node.rx == ".":
            node.rx = "(?s:.)"
    for rule in list(rules.values()):
        del rules[rule.name]
        rule.name = names[rule.name]
        rules[rule.name] = rule


def _nodes(rules: dict[str, RuleNode]) -> Iterator[ASTNode]:
    left: list[ASTNode] = list(rules.values())
    while left:
        node = left.pop()
        yield node
        left += node.children()
