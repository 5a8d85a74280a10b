"""Errors of schemas and grammars name the place of the part that is refused."""

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from gateway_svc.constraints import ConstraintError, ConstraintProblem, UnvalidatedConstraint, checked_grammar
from gateway_svc.field_paths import Field
from gateway_svc.schema_places import with_place

OPTIONAL = {"type": "object", "properties": {"a": {}}}
PLACES: dict[str, tuple[Any, str, str]] = {
    "type": ({"properties": {"a": {"type": "strin"}}}, "#/properties/a/type", "strin"),
    "value": ({"items": {"type": "number", "minimum": "x"}}, "#/items/minimum", "Expected f64"),
    "value of a list": ({"anyOf": [{"type": "null"}, {"required": "x"}]}, "#/anyOf/1/required", "array"),
    "no schema": ({"items": {"type": "object", "properties": {"p": 3}}}, "#/items/properties/p", "an object or"),
    "one of": ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "#/items/oneOf", "exclude each other"),
    "names": ({"items": {"patternProperties": {"^a": {}, "b$": {}}}}, "#/items/patternProperties", "not disjoint"),
    "number of properties": ({"items": {**OPTIONAL, "maxProperties": 3}}, "#/items", "are required"),
    "pattern": (
        {"properties": {"p": {"pattern": "a"}, "q": {"type": "string", "pattern": "a("}}},
        "#/properties/q/pattern",
        "unclosed group (at character 2)",
    ),
    "pattern of names": ({"patternProperties": {"a": {}, "(": {}}}, "#/patternProperties/(", "(at character 1)"),
    "reference": ({"properties": {"a": {"$ref": "#/nowhere"}}}, "#/properties/a/$ref", "/nowhere"),
    "other document": ({"items": {"$ref": "https://e.com/x"}}, "#/items/$ref", "e.com"),
    "referred to": ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "x"}}}, "#/$defs/a/type", "Invalid type"),
    "definition that is used": (
        {"$defs": {"a": {"type": "x"}, "b": {"type": "x"}}, "items": {"$ref": "#/$defs/b"}},
        "#/$defs/b/type",
        "Invalid type",
    ),
    "names of the pointer": ({"properties": {"a/b~c": {"type": "x"}}}, "#/properties/a~1b~0c/type", "Invalid type"),
    "no value": ({"type": "object", "properties": {"a": {"const": 1, "enum": [2]}}, "required": ["a"]}, "#", "'a'"),
    "dates": ({"items": {"type": "string", "format": "date"}, "additionalItems": {}, "not": {}}, "#/not", "not"),
}  # fmt: skip


def error_of(text: str, vocabulary: LLTokenizer, field: Field = Field.JSON_SCHEMA) -> ConstraintError:
    with pytest.raises(ConstraintError) as raised:
        checked_grammar(UnvalidatedConstraint(field, text), vocabulary)
    return with_place(raised.value, vocabulary)


@pytest.mark.parametrize("name", PLACES)
def test_a_schema_is_refused_with_the_place_of_its_part(name: str, vocabulary: LLTokenizer) -> None:
    schema, place, words = PLACES[name]
    error = error_of(json.dumps(schema), vocabulary)
    assert str(error).startswith(f"at {place}: ")
    assert words in str(error)
    assert error.problem is ConstraintProblem.INVALID


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"type": "object", "type": "object"}', "#/type"),
        ('{"properties": {"a": {}, "b": [{"x": 1, "y/": 2, "y/": 2}]}}', "#/properties/b/0/y~1"),
        ('{"enum": [{"a": 1, "a": 2}]}', "#/enum/0/a"),
    ],
)
def test_a_key_that_is_twice_has_its_place(text: str, place: str, vocabulary: LLTokenizer) -> None:
    assert str(error_of(text, vocabulary)) == f"at {place}: the key is twice in its object"


def test_a_schema_that_is_too_complex_has_the_place_of_the_part_that_is(vocabulary: LLTokenizer) -> None:
    hard = {"type": "string", "pattern": "(" * 300 + "a" + ")" * 300}
    error = error_of(json.dumps({"properties": {"a": {"type": "string"}, "b": hard}}), vocabulary)
    assert error.problem is ConstraintProblem.TOO_COMPLEX
    assert str(error).startswith("at #/properties/b/pattern: ")


def test_the_search_ends_without_a_place_when_its_time_is_over(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.schema_places._SECONDS", -1.0)
    assert str(error_of('{"items": {"type": "x"}}', vocabulary)) == "Invalid type: x"


@pytest.mark.parametrize(
    ("text", "line"), [('root ::= a\na ::= "x" |\n  "y" b-c\n', 3), ("root ::= x", 1), ("root ::= root2\n", 1)]
)
def test_a_rule_of_gbnf_that_is_undefined_has_its_line(text: str, line: int, vocabulary: LLTokenizer) -> None:
    assert f" not found at line {line}, " in str(error_of(text, vocabulary, Field.GBNF))
