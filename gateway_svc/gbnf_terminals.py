"""Makes one terminal of a part of a GBNF grammar that loops over characters and whose end is certain, such as a string
in quotes.

GBNF has no terminals. If each character were one, a mask would have to parse each character of each token, which
exceeds the limits with a usual vocabulary. The lexer takes the longest text that a terminal matches. So a part is
replaced only if no text of it begins another one, or a text of another terminal, or is begun by one.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
)

from gateway_svc.character_sets import ALL, CharacterSet, overlap, union

_MAX_REGEX_LENGTH = 2000
_MAX_PARTS = 8  # of a sequence that become one terminal
_MAX_TERMINALS = 64
_MAX_DEPTH = 16  # of rules within rules that are written in place of their names


@dataclass
class CharactersNode(RegexNode):
    """One character of a set; None: the set is not known."""

    characters: CharacterSet | None = None


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts that a part of a grammar matches.

    `regex` is in the syntax of llguidance, `python` in that of `re`. `after` are the characters with which a whole text
    may continue to a longer one.
    """

    regex: str
    python: str
    first: CharacterSet
    after: CharacterSet = ()
    is_nullable: bool = False
    is_loop: bool = False


_NOTHING = _Texts("", "", (), is_nullable=True)


@dataclass
class _TerminalNode(RegexNode):
    """A part that became a terminal."""

    texts: _Texts = _NOTHING


def merge_characters(rules: dict[str, RuleNode], excluded: set[str]) -> set[str]:
    """Replaces parts of these rules, but those of `excluded`. Returns those that may not be replaced: if there are any,
    the rules are of no use. Parts are named by their regular expressions.
    """
    merger = _Merger(rules, excluded)
    for rule in rules.values():
        merger.merge_rule(rule)
    return set(_conflicts(rules))


class _Merger:
    def __init__(self, rules: dict[str, RuleNode], excluded: set[str]) -> None:
        self._rules = rules
        self._excluded = excluded
        self._depth = 0
        self._texts: dict[str, _Texts | None] = {}  # of rules; None also for one in progress

    def merge_rule(self, rule: RuleNode) -> _Texts | None:
        """Replaces parts of a rule; returns its texts if it has none and is regular."""
        if rule.name not in self._texts:
            self._texts[rule.name] = None
            self._depth += 1
            self._texts[rule.name] = self._merge(rule.alternatives)
            self._depth -= 1
        return self._texts[rule.name]

    def _merge(self, node: ASTNode) -> _Texts | None:
        """The same for a part."""
        match node:
            case LiteralNode():
                return _literal(json.loads(f'"{node.value}"'))
            case CharactersNode():
                return None if node.characters is None else _characters(node.rx, node.characters)
            case RegexNode(rx="."):
                return _Texts("(?s:.)", "(?s:.)", ALL)
            case RuleRefNode():
                rule = self._rules.get(node.name)
                return None if rule is None or self._depth > _MAX_DEPTH else self.merge_rule(rule)
            case RepetitionNode():
                inner = self._merge(node.node)
                return None if inner is None else _repeated(inner, node.min_times, node.max_times)
            case AlternativeNode():
                return _any_of([self._merge(each) for each in node.alternatives])
            case SequenceNode():
                return self._merge_sequence(node)
        return None

    def _merge_sequence(self, node: SequenceNode) -> _Texts | None:
        texts = [self._merge(each) for each in node.nodes]
        whole: _Texts | None = _NOTHING
        for each in texts:
            whole = _followed_by(whole, each)
        merged: list[ASTNode] = []
        place = 0
        while place < len(texts):
            end, terminal = self._terminal_at(texts, place)
            merged += node.nodes[place:end] if terminal is None else [_TerminalNode(terminal.regex, terminal)]
            place = end
        if len(merged) == len(node.nodes) and not any(isinstance(each, _TerminalNode) for each in merged):
            return whole
        node.nodes = merged
        return None

    def _terminal_at(self, texts: Sequence[_Texts | None], place: int) -> tuple[int, _Texts | None]:
        """The shortest part that may become a terminal and begins at a place, with its end; None: there is none."""
        near = texts[place : place + _MAX_PARTS]
        if any(each is not None and each.is_loop for each in near):
            part: _Texts | None = _NOTHING
            for end, each in enumerate(near, start=place + 1):
                part = _followed_by(part, each)
                if part is None:
                    break
                if part.is_loop and not part.after and not part.is_nullable and part.regex not in self._excluded:
                    return end, part
        return place + 1, None


def _literal(text: str) -> _Texts:
    if not text:
        return _NOTHING
    regex = "".join(each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):X}}}" for each in text)
    return _Texts(regex, re.escape(text), ((ord(text[0]), ord(text[0])),))


def _characters(regex: str, characters: CharacterSet) -> _Texts:
    ranges = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in characters)
    return _Texts(regex, f"[{ranges}]" if ranges else "(?!)", characters)


def _repeated(texts: _Texts, least: int, most: int | None) -> _Texts | None:
    if texts.is_nullable or most == 0 or overlap(texts.after, texts.first):
        return None
    count = f"{{{least},{'' if most is None else most}}}"
    after = texts.after if least == most else union(texts.after, texts.first)
    return _checked(
        _Texts(
            f"(?:{texts.regex}){count}",
            f"(?:{texts.python}){count}",
            texts.first,
            after,
            least == 0,
            texts.is_loop or most is None,
        )
    )


def _any_of(choices: Sequence[_Texts | None]) -> _Texts | None:
    found: _Texts | None = None
    for texts in choices:
        if texts is None:
            return None
        if found is None:
            found = texts
            continue
        if overlap(found.first, texts.first):
            return None
        after = union(found.after, texts.after)
        if found.is_nullable:
            after = union(after, texts.first)
        if texts.is_nullable:
            after = union(after, found.first)
        found = _checked(
            _Texts(
                f"{found.regex}|{texts.regex}",
                f"{found.python}|{texts.python}",
                union(found.first, texts.first),
                after,
                found.is_nullable or texts.is_nullable,
                found.is_loop or texts.is_loop,
            )
        )
        if found is None:
            return None
    return found if found is None or len(choices) == 1 else _grouped(found)


def _grouped(texts: _Texts) -> _Texts:
    return _Texts(
        f"(?:{texts.regex})", f"(?:{texts.python})", texts.first, texts.after, texts.is_nullable, texts.is_loop
    )


def _followed_by(texts: _Texts | None, then: _Texts | None) -> _Texts | None:
    if texts is None or then is None or overlap(texts.after, then.first):
        return None  # otherwise it is certain where the first one ends
    return _checked(
        _Texts(
            texts.regex + then.regex,
            texts.python + then.python,
            union(texts.first, then.first) if texts.is_nullable else texts.first,
            union(texts.after, then.first, then.after) if then.is_nullable else then.after,
            texts.is_nullable and then.is_nullable,
            texts.is_loop or then.is_loop,
        )
    )


def _checked(texts: _Texts) -> _Texts | None:
    return texts if max(len(texts.regex), len(texts.python)) <= _MAX_REGEX_LENGTH else None


def _conflicts(rules: dict[str, RuleNode]) -> Iterator[str]:
    """Terminals that begin like another one."""
    merged: dict[str, _Texts] = {}
    literals: set[str] = set()
    others: dict[str, CharacterSet] = {}
    # Rules that are written in place of their names have no terminals of their own any more.
    used: set[str] = {"root"}
    left: list[ASTNode] = [rules["root"]] if "root" in rules else []
    while left:
        node = left.pop()
        left += node.children()
        match node:
            case RuleRefNode():
                if node.name in rules and node.name not in used:
                    used.add(node.name)
                    left.append(rules[node.name])
            case _TerminalNode():
                merged[node.rx] = node.texts
            case LiteralNode():
                literals.add(json.loads(f'"{node.value}"'))
            case CharactersNode():
                others[node.rx] = ALL if node.characters is None else node.characters
            case RegexNode():
                others[node.rx] = ALL
    if len(merged) > _MAX_TERMINALS:
        yield from merged
        return
    for regex, texts in merged.items():
        alike = (text for text in literals if text and overlap(texts.first, ((ord(text[0]), ord(text[0])),)))
        if (
            any(overlap(texts.first, characters) for characters in others.values())
            or any(regex != other and overlap(texts.first, theirs.first) for other, theirs in merged.items())
            # A text of the terminal begins no other one of it, so this one is not begun by one either.
            or not all(re.fullmatch(texts.python, text) for text in alike)
        ):
            yield regex
