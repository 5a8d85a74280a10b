"""The JSON types that a schema allows, and text as a value of one of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_STRING = frozenset({"string"})
_MAX_DEPTH = 16
_MAX_SCHEMAS = 1_024
"""Schemas that are looked at for the types of one parameter: options that refer to each other multiply."""


def parameter_types(parameters: Mapping[str, Any], name: str | None) -> frozenset[str]:
    """The types of one parameter in a tool's schema; None: of one that the schema does not name. That is a string,
    unless `additionalProperties` is a schema that says something else."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return _Types(parameters).of(properties[name])
    others = parameters.get("additionalProperties")
    return _Types(parameters).of(others) if isinstance(others, Mapping) and others else _STRING


def to_json(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that a model wrote as plain text: of one of these types if the text is one, else a
    string."""
    bare = text.strip()
    candidates = [bare]
    if bare.lower() in ("true", "false"):
        candidates.append(bare.lower())
    if bare.lower() in ("none", "null"):
        candidates.append("null")
    for candidate in candidates:
        if _types_of_text(candidate) & types:
            return candidate
    return json.dumps(text, ensure_ascii=False)


def _types_of_text(text: str) -> frozenset[str]:
    """The types other than string of a JSON text; none where it is not JSON."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return frozenset()
    return types_of(value) - _STRING


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def types_of(value: Any) -> frozenset[str]:
    """The types of a JSON value."""
    match value:
        case bool():
            return frozenset({"boolean"})
        case None:
            return frozenset({"null"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"integer", "number"} if value.is_integer() else {"number"})
        case str():
            return _STRING
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})


class _Types:
    """The types that schemas in `root` allow. Too many, where it is hard to say: then the text itself decides."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MAX_SCHEMAS

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        self._num_left -= 1
        if self._num_left < 0 or not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ALL_TYPES
        types = ALL_TYPES
        match schema.get("type"):
            case str(name):
                types &= named_types((name,))
            case list(names):
                self._num_left -= len(names) // _MAX_SCHEMAS  # a long list takes time, too
                types &= named_types(tuple(names))
        if "const" in schema:
            types &= types_of(schema["const"])
        if isinstance(values := schema.get("enum"), list):
            self._num_left -= len(values) // _MAX_SCHEMAS
            # One value of each kind: there may be 100,000.
            kinds = {(type(value), isinstance(value, float) and value.is_integer()): value for value in values}
            types &= frozenset().union(*map(types_of, kinds.values()))
        if isinstance(reference := schema.get("$ref"), str):
            types &= self.of(resolve_reference(reference, self._root), depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(keyword), list):
                types &= self._of_any(options, depth + 1)
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                if self._num_left < 0:
                    break
                types &= self.of(part, depth + 1)
        return types

    def _of_any(self, options: Sequence[Any], depth: int) -> frozenset[str]:
        types = frozenset[str]()
        for option in options:
            types |= self.of(option, depth)
            if types == ALL_TYPES:
                break
        return types


def named_types(names: tuple[Any, ...]) -> frozenset[str]:
    """The types that a schema names: a number may be an integer."""
    named = frozenset(name for name in names if isinstance(name, str))
    return named | {"integer"} if "number" in named else named


def resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema that a local reference names; None where there is none."""
    if not reference.startswith("#"):
        return None
    schema: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema
