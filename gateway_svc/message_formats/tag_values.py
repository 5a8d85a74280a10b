"""Rules of a grammar for the value of one parameter in tags: plain text, which is read by the types that the schema
allows.

llguidance's lexer takes the longest terminal and does not return to a shorter one. So all plain texts of a value are
one terminal with the closing tag, and what is JSON begins with another character.
"""

import json
from collections.abc import Callable
from typing import Any

from gateway_svc.message_formats.description import Tool, XmlCalls
from gateway_svc.message_formats.lark import escaped_regex, json_rule, quoted
from gateway_svc.message_formats.parameter_values import (
    ParameterValues,
    UnsupportedParameters,
    parameter_place,
    values_of,
)
from gateway_svc.message_formats.schema_types import parameter_types, to_json
from gateway_svc.message_formats.string_expressions import string_expression

Literal = Callable[[str], str]

_STRING = frozenset({"string"})
# Values of these types have few texts.
_WORDS = {"boolean": (True, False), "null": (None,)}
# As Python strips them.
_SPACE = r"\s\x1c-\x1f"
_BEGINNINGS = {"integer": "0-9-", "number": "0-9-", "object": "{", "array": r"\["}
_READ_AS_WORDS = {"boolean": "(?i:true|false)", "null": "(?i:null|none)"}


def tag_value_rules(
    calls: XmlCalls, tool: Tool, parameter: str | None, schema: Any, name: str, literal: Literal
) -> dict[str, str]:
    """Rules for a value with its closing tag and a line break. That of `name` with `_value` behind it is the whole.
    `literal` is how the grammar writes a text with markers.

    Without the name of a parameter, for a value that the tool's schema does not list. Raises UnsupportedParameters.
    """
    where = parameter_place(tool, parameter)
    types = parameter_types(tool.parameters, parameter)
    values = values_of(schema, tool.parameters, types, where)
    writing = _Writing(calls, values, types, where)
    closing = literal(calls.closing)
    if writing.has_strings:
        terminal = f"{name}_text".upper()
        texts = " | ".join((writing.strings(), *map(quoted, writing.texts())))
        if closing != quoted(calls.closing):  # a terminal has no tokens, and ends before one
            alternatives = [terminal, *writing.json_rules()]
            return {f"{name}_value": f"({' | '.join(alternatives)}) {closing}", terminal: texts}
        alternatives = [terminal, *(f"{each} {closing}" for each in writing.json_rules())]
        return {f"{name}_value": " | ".join(alternatives), terminal: f"({texts}) {closing}"}
    alternatives = [*map(quoted, writing.texts()), *writing.json_rules()]
    if not alternatives:
        raise UnsupportedParameters(f"{where}: no value of it can be written with this model's calls")
    return {f"{name}_value": f"({' | '.join(alternatives)}) {closing}"}


class _Writing:
    """The texts of the values of one parameter, of which the parser reads each as the value that it stands for."""

    def __init__(self, calls: XmlCalls, values: ParameterValues, types: frozenset[str], where: str) -> None:
        self._calls = calls
        self._values = values
        self._types = types
        self._where = where
        for typed in values.typed:
            for keyword in ("not", "if"):
                if keyword in typed.schema and typed.types & (_STRING | _WORDS.keys()):
                    raise UnsupportedParameters(f"{where}: {keyword} is not supported with this model's calls")

    @property
    def has_strings(self) -> bool:
        """Whether there are others than constants."""
        return any("string" in typed.types for typed in self._values.typed)

    @property
    def _is_any_text(self) -> bool:
        """Whether each text is a value, whatever it is read as."""
        allowed = frozenset().union(*(typed.types for typed in self._values.typed if not typed.is_restricted))
        return "string" in allowed and self._types <= allowed

    def texts(self) -> list[str]:
        """Texts of constants and of words. A constant whose text would be read as something else has none."""
        words = [
            value
            for typed in self._values.typed
            for kind in sorted(_WORDS.keys() & typed.types)
            for value in _WORDS[kind]
        ]
        constants = [*self._values.constants, *words]
        known = {json.dumps(value, ensure_ascii=False) for value in constants}
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in constants]
        return [text for text in texts if self._calls.parameter_end not in text and self._read(text) in known]

    def _read(self, text: str) -> str:
        if self._types == _STRING:
            return json.dumps(text, ensure_ascii=False)
        return json.dumps(json.loads(to_json(text, self._types)), ensure_ascii=False)

    def strings(self) -> str:
        """The body of a terminal for the strings that are not constants."""
        line = rf"((?s:.*)\n)?({escaped_regex(self._calls.parameter)}|{escaped_regex(self._calls.last_tag)})"
        excluded = [f"(?s:.*){escaped_regex(self._calls.parameter_end)}(?s:.*)", f"{line}(?s:.*)"]
        if self._is_any_text:
            return f"(/(?s:.*)/ & {_none_of(excluded)})"
        strings = [typed for typed in self._values.typed if "string" in typed.types]
        bodies = [string_expression(typed.schema, self._where) or "/(?s:.*)/" for typed in strings]
        if others := self._types - _STRING:
            beginnings = "".join(sorted({_BEGINNINGS[kind] for kind in others & _BEGINNINGS.keys()}))
            excluded.append(f"[{_SPACE}{beginnings}](?s:.*)")
            excluded += (f"{_READ_AS_WORDS[kind]}[{_SPACE}]*" for kind in sorted(others & _READ_AS_WORDS.keys()))
        return " | ".join(f"({body} & {_none_of(excluded)})" for body in bodies)

    def json_rules(self) -> list[str]:
        """Rules for values that are JSON; none where they are among the texts."""
        if self.has_strings and self._is_any_text:
            return []
        kinds = frozenset(_BEGINNINGS)
        return [json_rule(typed.of(kinds).schema) for typed in self._values.typed if typed.types & kinds]


def _none_of(regexes: list[str]) -> str:
    return " & ".join(f"~/{each}/" for each in regexes)
