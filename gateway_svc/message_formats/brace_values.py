"""Rules of a grammar for values in braces: JSON whose keys are bare, and whose strings stand between two markers.

As in tags, all strings of a value are one terminal, with the closing marker where that is no token.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from gateway_svc.json_schemas import ANNOTATIONS
from gateway_svc.message_formats.description import BraceCalls
from gateway_svc.message_formats.lark import escaped_regex, in_order, json_rule, other_keys, quoted
from gateway_svc.message_formats.layout import BRACE_KEY, in_braces
from gateway_svc.message_formats.parameter_values import TypedValues, UnsupportedParameters, values_of
from gateway_svc.message_formats.schema_types import ALL_TYPES
from gateway_svc.message_formats.string_expressions import string_expression
from gateway_svc.message_formats.tag_values import Literal

_MAX_DEPTH = 8
_NUMBERS = frozenset({"integer", "number"})
_WORDS = {"boolean": ("true", "false"), "null": ("null",)}
_OF_LISTS = {"type", "items", "minItems", "maxItems", "$defs", "definitions"}
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
KEY_REGEX = r"[^\s:,{}\[\]<\"]{1,64}"


class BraceValues:
    """The values of one tool's arguments."""

    def __init__(self, calls: BraceCalls, root: Mapping[str, Any], literal: Literal) -> None:
        """`literal` is how the grammar writes a text with markers."""
        self._calls = calls
        self._root = root
        self._literal = literal

    def rules(self, schema: Any, name: str, where: str, depth: int = 0) -> dict[str, str]:
        """Rules of which that of `name` is a value. Raises UnsupportedParameters."""
        if schema is True or (isinstance(schema, Mapping) and not schema.keys() - ANNOTATIONS):
            return self._any_rules(name)
        if depth > _MAX_DEPTH:
            raise UnsupportedParameters(f"{where}: schemas are nested too deeply")
        values = values_of(schema, self._root, ALL_TYPES, where)
        words = [one for one in values.constants if isinstance(one, str)]
        texts = [quoted(one) for one in words if self._calls.quote not in one]
        alternatives = [
            self._literal(in_braces(self._calls, one)) for one in values.constants if not isinstance(one, str)
        ]
        rules: dict[str, str] = {}
        for index, typed in enumerate(values.typed):
            if "string" in typed.types:
                texts.append(f"({string_expression(typed.schema, where) or '/(?s:.*)/'} & {self._without_quote()})")
            alternatives += (quoted(word) for kind in sorted(_WORDS.keys() & typed.types) for word in _WORDS[kind])
            if numbers := typed.types & _NUMBERS:
                alternatives.append(json_rule(typed.of(numbers).schema))
            for kind, of_kind in (("array", self._list_rules), ("object", self._object_rules)):
                if kind in typed.types:
                    part = f"{name}_{kind}_{index}"
                    alternatives.append(part)
                    rules |= of_kind(typed, part, where, depth + 1)
        if texts:
            alternatives.append(f"{self._literal(self._calls.quote)} {self._text(name)} {self._closing()}".rstrip())
            body = " | ".join(texts)
            rules[self._text(name)] = body if self._closing() else f"({body}) {quoted(self._calls.quote)}"
        if not alternatives:
            raise UnsupportedParameters(f"{where}: no value of it can be written with this model's calls")
        return {name: " | ".join(alternatives), **rules}

    def _text(self, name: str) -> str:
        return f"{name}_text".upper()

    def _without_quote(self) -> str:
        return f"~/(?s:.*){escaped_regex(self._calls.quote)}(?s:.*)/"

    def _closing(self) -> str:
        """The closing marker, where it is a token: else it is a part of the terminal before it."""
        literal = self._literal(self._calls.quote)
        return "" if literal == quoted(self._calls.quote) else literal

    def _list_rules(self, typed: TypedValues, name: str, where: str, depth: int) -> dict[str, str]:
        schema = typed.schema
        self._check_keywords(schema, _OF_LISTS, "array", where)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not all(isinstance(one, int) and one >= 0 for one in (least, 0 if most is None else most)):
            raise UnsupportedParameters(f"{where}: minItems and maxItems must be integers from 0 on")
        if most is not None and most < least:
            raise UnsupportedParameters(f"{where}: maxItems must not be below minItems")
        if most == 0:
            return {name: '"[]"'}
        items = f"{name}_item"
        if most != 1:  # llguidance takes no repetition of at most 0 times
            items += f' ("," {name}_item){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return {
            name: f'"[" {items if least else f"({items})?"} "]"',
            **self.rules(schema.get("items", True), f"{name}_item", where, depth),
        }

    def _object_rules(self, typed: TypedValues, name: str, where: str, depth: int) -> dict[str, str]:
        schema = typed.schema
        self._check_keywords(schema, _OF_OBJECTS, "object", where)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise UnsupportedParameters(f"{where}: properties must be an object, and required an array")
        if missing := [key for key in required if key not in properties]:
            raise UnsupportedParameters(f"{where}: required names {missing[0]!r}, which is not in properties")
        others = schema.get("additionalProperties", not properties)
        rules = {name: f'"{{" {name}_all "}}"'}
        parts = []
        for index, (key, of_key) in enumerate(properties.items()):
            part = f"{name}_{index}"
            parts.append((part, key in required))
            if not BRACE_KEY.fullmatch(key):
                raise UnsupportedParameters(f"{where}: the name {key!r} is not supported with this model's calls")
            rules[part] = f"{quoted(f'{key}:')} {part}_value"
            rules |= self.rules(of_key, f"{part}_value", where, depth)
        if others is not False:
            rules |= self.other_rules(f"{name}_other", others, properties, where, depth)
        return {**rules, **in_order(f"{name}_all", parts, f"{name}_other" if others is not False else "", ",")}

    def other_rules(self, name: str, schema: Any, listed: Iterable[str], where: str, depth: int = 0) -> dict[str, str]:
        """A key that a schema does not list, with its value."""
        key = f"{name}_key".upper()
        return {
            name: f'{key} ":" {name}_value',
            key: other_keys(KEY_REGEX, listed),
            **self.rules(schema, f"{name}_value", where, depth),
        }

    def _any_rules(self, name: str) -> dict[str, str]:
        """Any value: one that contains others is of the same rule."""
        opening, closing = self._literal(self._calls.quote), self._closing()
        text = f"/(?s:.*)/ & {self._without_quote()}"
        key = f"{name}_any_key".upper()
        item = f'{key} ":" {name}'
        return {
            name: " | ".join(
                (
                    f"{opening} {self._text(name)} {closing}".rstrip(),
                    json_rule({"type": "number"}),
                    *map(quoted, ("true", "false", "null")),
                    f'"[" ({name} ("," {name})*)? "]"',
                    f'"{{" ({item} ("," {item})*)? "}}"',
                )
            ),
            key: f"/{KEY_REGEX}/",
            self._text(name): text if closing else f"({text}) {quoted(self._calls.quote)}",
        }

    @staticmethod
    def _check_keywords(schema: Mapping[str, Any], known: set[str], kind: str, where: str) -> None:
        of_others = {"pattern", "format", "minLength", "maxLength", "minimum", "maximum", "multipleOf"}
        of_others |= {"exclusiveMinimum", "exclusiveMaximum"} | (_OF_LISTS | _OF_OBJECTS)
        for keyword in schema:
            if keyword not in known | of_others:
                raise UnsupportedParameters(f"{where}: {keyword} of an {kind} is not supported with this model's calls")
