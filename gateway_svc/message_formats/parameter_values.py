"""The values that a tool's schema allows for one parameter, as alternatives that a format can write one by one."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from gateway_svc.json_schemas import ANNOTATIONS
from gateway_svc.message_formats.description import Tool
from gateway_svc.message_formats.schema_types import named_types, resolve_reference, types_of

_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")
# Keywords whose meaning depends on others that stand in the same schema: they are not taken from two.
_GROUPS = (
    {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"},
    {"items", "prefixItems", "additionalItems", "unevaluatedItems"},
    {"contains", "minContains", "maxContains"},
    {"if", "then", "else"},
    {"enum", "const"},
)
_MAX_DEPTH = 16
_MAX_ALTERNATIVES = 64


class UnsupportedParameters(Exception):  # noqa: N818
    """Parameters that a format cannot write under a grammar. The text is for the client: it names them."""


@dataclass(frozen=True, slots=True)
class TypedValues:
    """The values of some types that a schema allows. No keyword of it combines schemas. `is_restricted` is whether it
    may leave out some values of these types."""

    types: frozenset[str]
    schema: Mapping[str, Any]
    is_restricted: bool

    def of(self, types: frozenset[str]) -> "TypedValues":
        """Those of fewer types."""
        kept = self.types & types
        return TypedValues(kept, {**self.schema, "type": sorted(kept)}, self.is_restricted)


@dataclass(frozen=True, slots=True)
class ParameterValues:
    """All values of a parameter."""

    constants: tuple[Any, ...]
    typed: tuple[TypedValues, ...]


def parameter_place(tool: Tool, parameter: str | None) -> str:
    """What errors name for a parameter of a tool; without a name, for those that its schema does not list."""
    return f"parameters of {tool.name}: {'additionalProperties' if parameter is None else parameter}"


def values_of(schema: Any, root: Mapping[str, Any], types: frozenset[str], where: str) -> ParameterValues:
    """The values that a schema in `root` allows, of some types only.

    `where` is what errors name. Raises UnsupportedParameters for schemas that alternatives do not have exactly.
    """
    constants: dict[str, Any] = {}
    typed: list[TypedValues] = []
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    for one in _Flattening(root, where).schemas(schema, 0):
        kinds = _kinds(one)
        if "const" in one or "enum" in one:
            constants |= {json.dumps(each): each for each in _constants(one, where) if types_of(each) & kinds & types}
        elif kinds & types:
            is_restricted = any(keyword != "type" for keyword in one)
            typed.append(TypedValues(kinds, {**definitions, **one}, is_restricted).of(types))
    if not constants and not typed:
        raise UnsupportedParameters(f"{where}: no value is allowed")
    return ParameterValues(tuple(constants.values()), tuple(typed))


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    match schema.get("type"):
        case None:
            return named_types(("string", "number", "boolean", "null", "object", "array"))
        case list(names):
            return named_types(tuple(names))
        case name:
            return named_types((name,))


def _constants(schema: Mapping[str, Any], where: str) -> Sequence[Any]:
    for keyword in schema:
        if keyword not in ("const", "enum", "type"):
            listed = "const" if "const" in schema else "enum"
            raise UnsupportedParameters(f"{where}: {keyword} beside {listed} is not supported with this model's calls")
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list):
        raise UnsupportedParameters(f"{where}: enum must be an array")
    return values


class _Flattening:
    """Writes references and combined schemas out."""

    def __init__(self, root: Mapping[str, Any], where: str) -> None:
        self._root = root
        self._where = where

    def schemas(self, schema: Any, depth: int) -> list[Mapping[str, Any]]:
        """Schemas of which a value must match one. None of them combines others."""
        if schema is True:
            return [{}]
        if schema is False:
            return []
        if not isinstance(schema, Mapping):
            raise self._error("a schema must be an object, true or false")
        if depth > _MAX_DEPTH:
            raise self._error("schemas are nested too deeply")
        own = {key: item for key, item in schema.items() if key not in (*_COMBINING, *_DEFINITIONS, *ANNOTATIONS)}
        parts: list[list[Mapping[str, Any]]] = [[own]]
        for keyword in _COMBINING:
            if keyword in schema:
                parts += self._parts(keyword, schema[keyword], depth + 1)
        if prod(map(len, parts)) > _MAX_ALTERNATIVES:
            raise self._error(f"more than {_MAX_ALTERNATIVES} alternatives are not supported with this model's calls")
        return [merged for each in product(*parts) if (merged := self._merged(each)) is not None]

    def _parts(self, keyword: str, value: Any, depth: int) -> Iterator[list[Mapping[str, Any]]]:
        """The alternatives of each schema that a value must match."""
        if keyword == "$ref":
            target = resolve_reference(value, self._root) if isinstance(value, str) else None
            if target is None:
                raise self._error(f"$ref {value!r} is not supported with this model's calls")
            yield self.schemas(target, depth)
            return
        if not isinstance(value, list) or not value:
            raise self._error(f"{keyword} must be an array that is not empty")
        options = [self.schemas(each, depth) for each in value]
        if keyword == "allOf":
            yield from options
            return
        if keyword == "oneOf" and not _are_apart(options):
            raise self._error("oneOf whose schemas may match the same value is not supported with this model's calls")
        yield [each for option in options for each in option]

    def _merged(self, schemas: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """One schema that says the same as several; None: it allows no value."""
        merged: dict[str, Any] = {}
        for schema in schemas:
            for group in _GROUPS:
                if merged.keys() & group and schema.keys() & group:
                    raise self._beside(sorted(schema.keys() & group)[0])
            if "type" in merged and "type" in schema:
                kinds = _kinds(merged) & _kinds(schema)
                if not kinds:
                    return None
                merged["type"] = sorted(kinds)
            for keyword, value in schema.items():
                if keyword != "type" and keyword in merged:
                    raise self._beside(keyword)
                merged.setdefault(keyword, value)
        return merged

    def _beside(self, keyword: str) -> UnsupportedParameters:
        return self._error(f"{keyword} in two schemas of one value is not supported with this model's calls")

    def _error(self, message: str) -> UnsupportedParameters:
        return UnsupportedParameters(f"{self._where}: {message}")


def _are_apart(options: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
    """Whether no value matches two of the options."""
    seen: list[tuple[frozenset[str], frozenset[str] | None]] = []
    for option in options:
        own = [(_kinds_with_constants(schema), _texts(schema)) for schema in option]
        for kinds, texts in own:
            for others, other_texts in seen:
                if kinds & others and (texts is None or other_texts is None or texts & other_texts):
                    return False
        seen += own
    return True


def _kinds_with_constants(schema: Mapping[str, Any]) -> frozenset[str]:
    texts = _texts(schema)
    return _kinds(schema) if texts is None else frozenset().union(*(types_of(json.loads(text)) for text in texts))


def _texts(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The constants of a schema as JSON; None for one without."""
    if "const" in schema:
        return frozenset((json.dumps(schema["const"]),))
    values = schema.get("enum")
    return frozenset(map(json.dumps, values)) if isinstance(values, list) else None
