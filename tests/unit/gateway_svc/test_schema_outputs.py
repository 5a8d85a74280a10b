"""Random texts that a schema's grammar allows are valid under the schema: nothing in it is weaker than it says."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway_svc.constraints import ConstraintError, UnvalidatedConstraint, checked_grammar
from gateway_svc.field_paths import Field
from gateway_svc.message_formats.lark import json_rule
from svc_common.grammars import compile_grammar, load_grammar_tokenizer
from tiny_model import EOS, tiny_tokenizer

NUM_TEXTS = 25
MAX_TOKENS = 400


def closed(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TREE = {
    "$defs": {"node": closed(v={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})},
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, Any] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "several types": {"type": ["integer", "string", "null"]},
    "minimum": {"type": "integer", "minimum": -3, "maximum": 1000},
    "exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "fractions": {"type": "number", "minimum": -0.5, "maximum": 12.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0},
    "hundredths": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
    "length": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
    "pattern within": {"type": "string", "pattern": "[0-9]x", "maxLength": 8},
    "pattern and length": {"type": "string", "pattern": "^(ab)*$", "minLength": 3, "maxLength": 7},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "email": {"type": "string", "format": "email"},
    "enum": {"enum": ["a", 1, None, 2.5, {"b": [1]}, "é\n"]},
    "const": {"const": {"a": [1, "2", {"b": None}]}},
    "enum of type": {"type": "string", "enum": ["a", 1, "b"]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
    "tuple with rest": {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 5},
    "object": closed(a={"type": "integer"}, b={"type": "boolean"}),
    "optional": {**closed(a={"type": "integer"}, b={"type": "null"}), "required": ["b"]},
    "additional": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    "additional beside": {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}},
    "required without properties": {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
    "patterns of names": {
        "type": "object",
        "patternProperties": {"^s_": {"const": "s"}, "^n_": {"const": 1}},
        "additionalProperties": False,
    },
    "most properties": {"type": "object", "additionalProperties": {"const": 1}, "maxProperties": 1},
    "any of": {"anyOf": [{"type": "integer"}, closed(a={"type": "null"})]},
    "one of": {"oneOf": [closed(kind={"const": "a"}, x={"type": "integer"}), closed(kind={"const": "b"})]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}, {"multipleOf": 2}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 5}, "b": {"const": 1}}, "additionalProperties": False},
        ]
    },
    "all of patterns": {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$"}, {"maxLength": 5}]},
    "reference": TREE,
    "reference and more": {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5, "maximum": 9},
    "definitions of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"n": {"type": "integer", "exclusiveMaximum": 3}},
        "items": {"$ref": "#/definitions/n"},
        "type": "array",
        "maxItems": 2,
    },
    "anything": True,
    "nothing said": {"title": "x"},
    "no type": {"minimum": 3, "minLength": 2, "maxItems": 1, "maxProperties": 0},
    "deep": closed(a=closed(b=closed(c={"type": "array", "items": closed(d={"type": "string", "maxLength": 3})}))),
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    """The tiny vocabulary: a token for each byte, and a few more."""
    return load_grammar_tokenizer(tiny_tokenizer().to_str(), [EOS])


def random_text(matcher: LLMatcher, vocabulary: LLTokenizer, rng: random.Random) -> str | None:
    """A text that matches, or None if it did not end in time."""
    token_ids: list[int] = []
    for num_tokens in range(MAX_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        allowed = [token_id for token_id in range(vocabulary.vocab_size) if mask >> token_id & 1]
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return vocabulary.decode_bytes(token_ids).decode()
        # Once the text is long, what closes strings, arrays and objects comes first.
        closing = [token_id for token_id in allowed if vocabulary.decode_bytes([token_id]) in (b'"', b"]", b"}")]
        plain = [token_id for token_id in allowed if token_id != EOS and not vocabulary.is_special_token(token_id)]
        token_ids.append(rng.choice(closing if closing and num_tokens > rng.randrange(60) else plain))
        matcher.consume_token(token_ids[-1])
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_texts_are_valid(name: str, vocabulary: LLTokenizer) -> None:
    schema = SCHEMAS[name]
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    constraint = UnvalidatedConstraint(Field.JSON_SCHEMA, json.dumps(schema))
    start = compile_grammar(vocabulary, checked_grammar(constraint, vocabulary))
    rng = random.Random(name)

    texts = [random_text(start.deep_copy(), vocabulary, rng) for _ in range(NUM_TEXTS)]

    ended = [text for text in texts if text is not None]
    assert ended
    for text in ended:
        assert validator.is_valid(json.loads(text)), text


DAY = {"type": "string", "format": "date"}
DATED: dict[str, tuple[Any, str]] = {
    "date": (DAY, '"%s"'),
    "date-time": ({"type": "string", "format": "date-time"}, '"%sT23:59:60Z"'),
    "no type": ({"format": "date"}, '"%s"'),
    "nested": (closed(a=closed(b={"type": "array", "items": DAY})), '{"a": {"b": ["%s"]}}'),
    "property of that name": (closed(format=DAY), '{"format": "%s"}'),
    "reference": ({"$defs": {"day": DAY}, "$ref": "#/$defs/day"}, '"%s"'),
    "beside a reference": ({"$defs": {"text": {"type": "string"}}, "$ref": "#/$defs/text", "format": "date"}, '"%s"'),
    "any of": ({"anyOf": [DAY, {"type": "null"}]}, '"%s"'),
    "one of": ({"oneOf": [DAY, {"type": "null"}]}, '"%s"'),
    "all of": ({**DAY, "allOf": [{"maxLength": 10}]}, '"%s"'),
    "pattern": ({**DAY, "pattern": "^[0-9]{4}-"}, '"%s"'),
}  # fmt: skip
DAYS = {
    "2024-02-29": True, "2000-02-29": True, "0000-02-29": True, "2023-02-28": True, "2023-12-29": True,
    "2023-02-29": False, "1900-02-29": False, "2100-02-29": False, "2024-02-30": False, "2023-04-31": False,
}  # fmt: skip


@pytest.mark.parametrize("is_tool", [False, True], ids=["constraint", "tool"])
@pytest.mark.parametrize("name", DATED)
def test_dates_are_days_of_the_calendar(name: str, is_tool: bool, vocabulary: LLTokenizer) -> None:
    schema, text = DATED[name]
    written = json.dumps(schema)
    constraint = UnvalidatedConstraint(Field.JSON_SCHEMA, written)
    grammar = f"start: {json_rule(schema)}" if is_tool else checked_grammar(constraint, vocabulary)
    start = compile_grammar(vocabulary, grammar)

    def matches(day: str) -> bool:
        matcher, token_ids = start.deep_copy(), vocabulary.tokenize_str(text % day)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    assert {day: matches(day) for day in DAYS} == DAYS
    assert json.dumps(schema) == written, "the client's schema is not changed"


REGEXES = [
    r"[a-z]+@[a-z]+\.(com|org)", r"\d{4}-\d{2}-\d{2}", r"(foo|bar){1,3}", r"[^x]{3}", r"a*b?c+", r"\w+\s\w+",
    r"(?i)yes|no",
    r"^\+?[1-9]\d{1,14}$", r"#[0-9A-Fa-f]{6}", r"(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}",
    r"[+-]?(\d+\.\d*|\.\d+|\d+)", r"/[a-z/]*", r"[\u4e00-\u9fff]{2}", r".{1,5}", r"(a(b(c)?)?)?d", r"\S{2}", r"\D\d",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_random_texts_match_the_regular_expression(regex: str, vocabulary: LLTokenizer) -> None:
    constraint = UnvalidatedConstraint(Field.REGEX, regex)
    start = compile_grammar(vocabulary, checked_grammar(constraint, vocabulary))
    rng = random.Random(regex)

    for _ in range(NUM_TEXTS):
        text = random_text(start.deep_copy(), vocabulary, rng)
        assert text is None or re.fullmatch(regex, text), text


def test_names_that_a_schema_does_not_list_could_be_repeated(vocabulary: LLTokenizer) -> None:
    """Why minProperties is refused beyond the required properties and one more."""
    schema = {"type": "object", "additionalProperties": True, "minProperties": 2}
    with pytest.raises(ConstraintError, match="minProperties"):
        checked_grammar(UnvalidatedConstraint(Field.JSON_SCHEMA, json.dumps(schema)), vocabulary)
    matcher = compile_grammar(vocabulary, f"start: %json {json.dumps(schema)}")
    assert matcher.try_consume_tokens(vocabulary.tokenize_str('{"a": 1, "a": 2}')) == 16


def test_a_schema_within_a_grammar_has_the_rules_of_one_alone(vocabulary: LLTokenizer) -> None:
    schema = '{"type": "object", "properties": {"day": {"format": "date", "type": "string"}}, "required": ["day"]}'
    grammar = checked_grammar(UnvalidatedConstraint(Field.GRAMMAR, f'start: "x" %json {schema}'), vocabulary)
    matcher = compile_grammar(vocabulary, grammar)

    def num_admitted(text: str) -> int:
        return matcher.deep_copy().try_consume_tokens(vocabulary.tokenize_str(text))

    day = 'x{"day": "2024-02-28"}'
    assert num_admitted(day) == len(vocabulary.tokenize_str(day))
    assert num_admitted(day.replace("{", "{\n")) == 2
    assert num_admitted(day.replace("02-28", "02-30")) < len(vocabulary.tokenize_str(day)) - 2
