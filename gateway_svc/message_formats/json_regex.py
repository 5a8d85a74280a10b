"""Regular expressions for texts, rewritten for the same texts within a string of JSON."""

import json
import re
from collections.abc import Iterator

_SPECIAL = tuple(chr(code) for code in (*range(0x20), 0x22, 0x5C))
"""Characters that a string of JSON has as escapes."""
_NOT_SPECIAL = r'[^"\\\x00-\x1f]'

_PART = re.compile(
    r"""(?P<class>\[\^?\]?(?:\\.|[^\]\\])*\])
    |(?P<property>\\[pP](?:\{[^}]*\}|.))
    |(?P<code>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[xuU]\{[0-9a-fA-F]+\}))
    |(?P<set>\\[dDwWsS]|\.)
    |(?P<group>\((?:\?(?:P?<[^>]*>|[a-zA-Z-]*[:)]))?)
    |(?P<close>\))
    |(?P<operator>\{[0-9, ]*\}|[|*+?^$])
    |(?P<escaped>\\.)
    |(?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_CODE = re.compile(r"\\[xuU]\{?([0-9a-fA-F]+)\}?")
_CONTROL_ESCAPES = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}


class UnsupportedRegex(Exception):  # noqa: N818
    """A regular expression that cannot be rewritten. The text is for the client: it names the part."""


def escaped_regex_of(regex: str, *, matches_line_breaks: bool = False) -> str:
    """The regular expression, without slashes around it, for texts that JSON has escaped: the quote, the backslash and
    control characters, each by its shortest escape. `matches_line_breaks`: `.` does. Raises UnsupportedRegex."""
    return "".join(_rewritten(regex, matches_line_breaks))


def json_escape(text: str) -> str:
    """A text as it stands in a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _rewritten(regex: str, matches_line_breaks: bool) -> Iterator[str]:
    dot_modes = [matches_line_breaks]
    for part in _PART.finditer(regex):
        text = part[0]
        match part.lastgroup:
            case "group":
                dot_modes.append(dot_modes[-1])
                flags = text.removeprefix("(?").rstrip(":)") if text[-1] in ":)" else ""
                on, _, off = flags.partition("-")
                if "x" in on:
                    raise UnsupportedRegex("the flag x is not supported")
                if "s" in flags:
                    dot_modes[-1] = "s" in on and "s" not in off
                if text.endswith(")"):  # the rest of the group that it stands in
                    mode = dot_modes.pop()
                    dot_modes[-1] = mode
                yield text
            case "close":
                if len(dot_modes) > 1:
                    dot_modes.pop()
                yield text
            case "operator":
                yield text
            case "class" | "property" | "set":
                members = _specials_in(text, matches_line_breaks=dot_modes[-1])
                yield _class(_bracketed(text, dot_modes[-1]), members) if members else text
            case _:
                yield _character(text, part.lastgroup)


def _character(text: str, kind: str | None) -> str:
    character = text
    if kind == "code":
        character = _decoded(text)
    elif kind == "escaped":
        character = _CONTROL_ESCAPES.get(text[1], text[1])
    return _escape(character) if character in _SPECIAL else text


def _decoded(text: str) -> str:
    found = _CODE.fullmatch(text)
    assert found is not None, "it is a code"
    code = int(found[1], 16)
    if code > 0x10FFFF:
        raise UnsupportedRegex(f"{text} is no character")
    return chr(code)


def _escape(character: str) -> str:
    return f"(?-i:{re.escape(json_escape(character))})"


def _class(characters: str, members: list[str]) -> str:
    """A class of characters, of which some are special."""
    escapes = [json_escape(member)[1:] for member in members]
    short = [re.escape(escape) for escape in escapes if len(escape) == 1]
    codes = [escape.removeprefix("u00") for escape in escapes if len(escape) > 1]
    forms = [f"[{''.join(short)}]"] if short else []
    digits = {first: "".join(code[1] for code in codes if code[0] == first) for first in "01"}
    forms += [f"u00{first}[{last}]" for first, last in digits.items() if last]
    return rf"(?:[{characters}&&{_NOT_SPECIAL}]|(?-i:\\(?:{'|'.join(forms)})))"


def _bracketed(text: str, matches_line_breaks: bool) -> str:
    if text == ".":
        return r"[\s\S]" if matches_line_breaks else r"[^\n]"
    return text if text.startswith("[") else f"[{text}]"


def _specials_in(text: str, *, matches_line_breaks: bool) -> list[str]:
    """The special characters of a class."""
    if text.startswith("["):
        inner = text[1:-1]
        if re.search(r"(?<!\\)\[|&&|--|~~", inner):
            raise UnsupportedRegex(f"the class {text} is not supported")
        text = f"[{_for_python(inner)}]"
    elif text[1:2] in ("p", "P"):
        text = f"[{_for_python(text)}]"
    try:
        pattern = re.compile(text, re.ASCII | (re.DOTALL if matches_line_breaks else 0))
    except re.error:
        raise UnsupportedRegex(f"the class {text} is not supported") from None
    return [character for character in _SPECIAL if pattern.fullmatch(character)]


def _for_python(inner: str) -> str:
    """The inside of a class as Python's `re` has it, as far as special characters are concerned."""

    def replaced(part: re.Match[str]) -> str:
        if part.lastgroup == "code":
            return re.escape(_decoded(part[0]))
        if part.lastgroup == "property":
            return _property(part[0])
        return part[0]

    return _PART_OF_CLASS.sub(replaced, inner)


_PART_OF_CLASS = re.compile(
    r"(?P<property>\\[pP](?:\{[^}]*\}|.))"
    r"|(?P<code>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[xuU]\{[0-9a-fA-F]+\}))"
    r"|\\."
)


def _property(text: str) -> str:
    """A Unicode property within a class: of letters, marks, numbers and separators no character is special."""
    name = text[2:].strip("{}")
    is_negated = (text[1] == "P") is not name.startswith("^")
    if not re.fullmatch(r"\^?(?:[LMNZ][a-z&]?|Alphabetic|Letter|Number|Mark|Separator)", name):
        raise UnsupportedRegex(f"the property {text} is not supported")
    return r"\x00-\x1f\"\\" if is_negated else "a"
