"""Grammars in GBNF, the syntax of llama.cpp, to llguidance's Lark syntax: its converter, with all of GBNF's escapes and
names."""

import json
from collections.abc import Iterator, Sequence

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    LiteralNode,
    Position,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    resolve,
)

from gateway_svc.character_sets import CharacterSet, complement, union
from gateway_svc.gbnf_terminals import CharactersNode, merge_characters

_MAX_ATTEMPTS = 3  # to find parts that can be terminals beside each other
_MAX_LENGTH_TO_MERGE = 20_000  # of a grammar, for the time that this takes
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


class InvalidGbnf(Exception):  # noqa: N818
    """A text that is not a grammar in GBNF. The text of the error names the place."""


def gbnf_to_lark(text: str) -> str:
    """Raises InvalidGbnf, and RecursionError for parentheses that are nested too deeply."""
    excluded = set[str]()
    for _ in range(_MAX_ATTEMPTS if len(text) <= _MAX_LENGTH_TO_MERGE else 0):
        rules = _parsed(text)
        try:
            conflicts = merge_characters(rules, excluded)
        except RecursionError:
            break
        if not conflicts:
            return _written(rules)
        excluded |= conflicts
    return _written(_parsed(text))


def _parsed(text: str) -> dict[str, RuleNode]:
    try:
        return _Parser().parse(text)
    except RecursionError:
        raise
    except Exception as error:  # the converter raises nothing narrower
        raise InvalidGbnf(str(error)) from None


def _written(rules: dict[str, RuleNode]) -> str:
    try:
        _rename(rules)
        resolve(rules)
    except RecursionError:
        raise
    except Exception as error:
        raise InvalidGbnf(str(error)) from None
    for node in _nodes(rules):
        if isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):
            node.node = AlternativeNode([node.node])  # in parentheses
    return "".join(f"{rule}\n" for rule in sorted(rules.values(), key=lambda rule: rule.order))


class _Name(str):
    """A name with its place."""

    place: Position


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

    @staticmethod
    def _parse_name(pos: Position) -> tuple[str, Position]:
        text, after = GrammarParser._parse_name(pos)
        name = _Name(text)
        name.place = pos
        return name, after

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
        parts: list[str] = []  # characters, and the empty text for the sign of a range
        while pos.current() != "]":
            is_range = pos.current() == "-" and len(text.lstrip("[^")) > 0 and pos.peek(2) != "-]"
            character, pos = self._character(pos)
            parts.append("" if is_range else character)
            is_plain = is_range or (character.isascii() and character.isalnum())
            text += character if is_plain else f"\\x{{{ord(character):X}}}"
        found = _character_set(parts)
        if found is not None and text.startswith("[^"):
            found = complement(found)
        return CharactersNode(f"{text}]", found), pos.advance()

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


def _character_set(parts: Sequence[str]) -> CharacterSet | None:
    """The characters of a class; None where a range has no beginning or end of its own."""
    ranges: list[tuple[int, int]] = []
    place = 0
    while place < len(parts):
        bounds = parts[place : place + 3]
        is_range = len(bounds) == 3 and not bounds[1]
        low, high = bounds[0], bounds[2] if is_range else bounds[0]
        if not low or not high or low > high:
            return None
        ranges.append((ord(low), ord(high)))
        place += 3 if is_range else 1
    return union(ranges)


def _rename(rules: dict[str, RuleNode]) -> None:
    """Names that Lark takes and that are still different in upper and lower case; the first rule stays `root`."""
    names = {name: name if name == "root" else f"r{index}" for index, name in enumerate(rules)}
    for node in _nodes(rules):
        if isinstance(node, RuleRefNode):
            if node.name not in names:
                message = f"Rule {node.name!r} not found"
                raise (
                    GbnfToLarkError(node.name.place, message) if isinstance(node.name, _Name) else InvalidGbnf(message)
                )
            node.name = names[node.name]
        elif isinstance(node, RegexNode) and node.rx == ".":
            node.rx = "(?s:.)"
    renamed = list(rules.values())
    rules.clear()
    for rule in renamed:
        rule.name = names[rule.name]
        rules[rule.name] = rule


def _nodes(rules: dict[str, RuleNode]) -> Iterator[ASTNode]:
    left: list[ASTNode] = list(rules.values())
    while left:
        node = left.pop()
        yield node
        left += node.children()
