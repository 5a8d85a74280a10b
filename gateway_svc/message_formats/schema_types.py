"""The JSON types that a schema allows, and text as a value of one of them."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_STRING = frozenset({"string"})
_MAX_DEPTH = 16


def parameter_types(parameters: Mapping[str, Any], name: str | None) -> frozenset[str]:
    """The types of one parameter in a tool's schema; None: of one that the schema does not name. That is a string,
    unless `additionalProperties` is a schema that says something else."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return _types(properties[name], parameters, 0)
    others = parameters.get("additionalProperties")
    return _types(others, parameters, 0) if isinstance(others, Mapping) and others else _STRING


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


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """The types that a schema allows. Too many, where it is hard to say: then the text itself decides."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ALL_TYPES
    types = ALL_TYPES
    match schema.get("type"):
        case str(name):
            types &= named_types((name,))
        case list(names):
            types &= named_types(tuple(names))
    if "const" in schema:
        types &= types_of(schema["const"])
    if isinstance(values := schema.get("enum"), list):
        types &= frozenset().union(*map(types_of, values))
    if isinstance(reference := schema.get("$ref"), str):
        types &= _types(resolve_reference(reference, root), root, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(keyword), list):
            types &= frozenset().union(*(_types(option, root, depth + 1) for option in options))
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            types &= _types(part, root, depth + 1)
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
