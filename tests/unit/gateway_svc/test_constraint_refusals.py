"""Constraints on the output that are refused: by which name, for which reason, and within which time."""

import json
import time
from typing import Any

import pytest

from constraint_forms import LARK, form, schema_form, structured
from gateway_requests import over_grpc, over_http, refused
from gateway_svc.constraints import ConstraintError, ConstraintProblem, UnvalidatedConstraint, checked_grammar
from gateway_svc.field_paths import Field
from gateway_svc.grammar_checker import GrammarChecker
from gateway_svc.tokenizer import ModelTokenizer
from quire.inference.v1 import inference_pb2 as api
from svc_common.errors import QuireError, Reason
from svc_common.grammars import MAX_GRAMMAR_BYTES, load_grammar_tokenizer
from tiny_model import EOS, tiny_tokenizer

INVALID, TOO_COMPLEX, FIELD, UNSUPPORTED = (
    Reason.GRAMMAR_INVALID,
    Reason.GRAMMAR_TOO_COMPLEX,
    Reason.INVALID_FIELD,
    Reason.FEATURE_UNSUPPORTED,
)

REFUSED: list[tuple[dict[str, Any], Reason, str]] = [
    (schema_form(None), FIELD, "response_format.json_schema.schema"),
    (schema_form("{}"), FIELD, "response_format.json_schema.schema"),
    (schema_form({}, strict="yes"), FIELD, "response_format.json_schema.strict"),
    (form("json_schema"), FIELD, "response_format.json_schema"),
    (form("grammar"), FIELD, "response_format.type"),
    (form("structural_tag"), UNSUPPORTED, "response_format.type"),
    ({"response_format": {}}, FIELD, "response_format.type"),
    ({"response_format": "json"}, FIELD, "response_format"),
    (structured(), FIELD, "structured_outputs"),
    (structured(json_object=False), FIELD, "structured_outputs"),
    (structured(structural_tag="{}"), UNSUPPORTED, "structured_outputs.structural_tag"),
    (structured(json=3), FIELD, "structured_outputs.json"),
    (structured(json="{"), INVALID, "structured_outputs.json"),
    (structured(regex=3), FIELD, "structured_outputs.regex"),
    (structured(regex="("), INVALID, "structured_outputs.regex"),
    (structured(regex=""), INVALID, "structured_outputs.regex"),
    (structured(regex="\ud800"), FIELD, "structured_outputs.regex"),
    (structured(choice="a"), FIELD, "structured_outputs.choice"),
    (structured(choice=["a", 1]), FIELD, "structured_outputs.choice[1]"),
    (structured(choice=[]), FIELD, "structured_outputs.choice"),
    (structured(choice=["a", ""]), FIELD, "structured_outputs.choice"),
    (structured(json={}, regex="a"), FIELD, "structured_outputs.regex"),
    (structured(regex="a", whitespace_pattern=" ?"), FIELD, "structured_outputs.whitespace_pattern"),
    (structured(json={}, whitespace_pattern=""), FIELD, "structured_outputs.whitespace_pattern"),
    (structured(json={}, whitespace_pattern=" *"), INVALID, "structured_outputs.whitespace_pattern"),
    (structured(json={}, whitespace_pattern="x?"), INVALID, "structured_outputs.whitespace_pattern"),
    (structured(json={}, whitespace_pattern="("), INVALID, "structured_outputs.whitespace_pattern"),
    (structured(regex="a", disable_any_whitespace=True), FIELD, "structured_outputs.disable_any_whitespace"),
    (
        structured(json={}, disable_any_whitespace=True, whitespace_pattern=" "),
        FIELD,
        "structured_outputs.whitespace_pattern",
    ),
    (
        structured(json_object=True, disable_additional_properties=True),
        FIELD,
        "structured_outputs.disable_additional_properties",
    ),
    ({"guided_json": {}, "guided_whitespace_pattern": "[ \n]*"}, INVALID, "guided_whitespace_pattern"),
    ({"guided_whitespace_pattern": " "}, FIELD, "guided_whitespace_pattern"),
    ({"guided_decoding_backend": "outlines", "guided_regex": "a"}, UNSUPPORTED, "guided_decoding_backend"),
    ({"structural_tag": "{}"}, UNSUPPORTED, "structural_tag"),
    ({"regex": "a", **form("json_object")}, FIELD, "regex"),
    ({"grammar": "start: x"}, INVALID, "grammar"),
    ({"grammar": "root ::= x"}, INVALID, "grammar"),
    ({"grammar": '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'}, INVALID, "grammar"),
    ({"grammar": "start: start"}, INVALID, "grammar"),
    ({"grammar": 'start: "a" %json {"x-guidance": {"lenient": true}, "not": {}}'}, INVALID, "grammar"),
    ({"grammar": 'start: %json {"x-guidance": {"whitespace_pattern": "[ \\n]*"}}'}, INVALID, "grammar"),
    ({"grammar": 'start: "a"\n%json {"minProperties": 3}'}, INVALID, "grammar"),
    ({"grammar": 'start: %json {"a": 1, "a": 2}'}, INVALID, "grammar"),
    ({"regex": "a", "ignore_eos": True}, UNSUPPORTED, "ignore_eos"),
    ({"regex": "a", "min_tokens": 1}, UNSUPPORTED, "min_tokens"),
    ({"regex": "a", "use_beam_search": True, "best_of": 2, "temperature": 0}, UNSUPPORTED, "use_beam_search"),
]


@pytest.mark.parametrize(("fields", "reason", "where"), REFUSED)
async def test_bad_constraints_are_refused_by_the_clients_own_name(
    fields: dict[str, Any], reason: Reason, where: str, tokenizer: ModelTokenizer, grammars: GrammarChecker
) -> None:
    assert await refused(over_http(tokenizer, grammars=grammars, prompt="a", **fields)) == (reason, where)


@pytest.mark.parametrize(
    ("constraint", "reason", "where"),
    [
        (api.Constraint(), FIELD, "generation.constraint"),
        (api.Constraint(json_schema=""), INVALID, "generation.constraint.json_schema"),
        (api.Constraint(regex="("), INVALID, "generation.constraint.regex"),
        (api.Constraint(grammar=""), INVALID, "generation.constraint.grammar"),
        (api.Constraint(gbnf=LARK), INVALID, "generation.constraint.gbnf"),
        (api.Constraint(choice=api.Choices()), FIELD, "generation.constraint.choice.choices"),
    ],
)
async def test_bad_constraints_are_refused_over_grpc(
    constraint: api.Constraint, reason: Reason, where: str, tokenizer: ModelTokenizer, grammars: GrammarChecker
) -> None:
    assert await refused(over_grpc(tokenizer, grammars=grammars, text="a", constraint=constraint)) == (reason, where)


# Keywords that would otherwise be ignored, so that the output could be invalid.
UNSERVED: list[tuple[Any, str]] = [
    ({"properties": {"a": {"not": {}}}}, "at #/properties/a/not: the keyword not is not supported"),
    ({"type": "string", "format": "ipv7"}, "at #/format: the format ipv7 is not supported"),
    ({"items": {"uniqueItems": True}}, "at #/items/uniqueItems: the keyword"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "at #/oneOf: oneOf is"),
    ({"type": "object", "minProperties": 3, "required": ["a"]}, "at #/minProperties: the keyword"),
    ({"properties": {"a": {"exclusiveMaximum": True}}}, "at #/properties/a/exclusiveMaximum: must be a number"),
    ({"x-guidance": {"lenient": True}}, "x-guidance"),
    *(
        ({"items": {name: {}}}, f"at #/items/{name}: the keyword {name} is")
        for name in (
            "if",
            "then",
            "else",
            "dependentSchemas",
            "contains",
            "propertyNames",
            "unevaluatedProperties",
            "unevaluatedItems",
        )
    ),
    ({"dependentRequired": {"a": ["b"]}}, "at #/dependentRequired: the keyword"),
    ({"$dynamicRef": "#a"}, "at #/[$]dynamicRef: the keyword"),
    ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "at #/patternProperties: .* disjoint"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 3}, "at #: .* required"),
    ({"$ref": "#/nowhere"}, "at #/[$]ref: .*/nowhere"),
    ({"$ref": "https://example.com/schema"}, "example.com"),
    ({"items": {"$ref": "#/items"}}, "at #/items/[$]ref: the reference leads to nothing but itself"),
    ({"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}}, "a/allOf/0/[$]ref: the reference leads to"),
    ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}}}, "[$]ref: the reference"),
    ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "leads to"),
    ({"type": "string", "pattern": "a(?=b)"}, "at #/pattern: .*at character 2"),
    ({"const": 1, "enum": [2]}, "nsatisfiable"),
    (False, "no text"),
    ({"const": float("1e999")}, "too large"),
]


@pytest.mark.parametrize(("schema", "words"), UNSERVED)
async def test_a_schema_is_never_applied_in_part(
    schema: Any, words: str, tokenizer: ModelTokenizer, grammars: GrammarChecker
) -> None:
    text = json.dumps(schema).replace("Infinity", "1e999")
    with pytest.raises(QuireError, match=words) as error:
        await over_http(tokenizer, grammars=grammars, prompt="a", guided_json=text)
    assert error.value.reason is INVALID


LONG = "a" * 900


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regex": f"{LONG}("}, "invalid regular expression: unclosed group (at character 901)"),
        (
            {"guided_json": {"type": "string", "pattern": f"{LONG}("}},
            "at #/pattern: invalid regular expression: unclosed group (at character 901)",
        ),
        (
            {"grammar": f"start: rule\nrule: /{LONG}(/"},
            "at 2(7): invalid regular expression: unclosed group (at character 901)",
        ),
        ({"guided_json": {"$ref": f"#/{LONG}"}}, f"at #/$ref: Pointer '/{'a' * 190} … {'a' * 184}' does not exist"),
    ],
    ids=["regex", "schema", "grammar", "reference"],
)
async def test_an_error_about_a_long_text_names_the_place_and_the_cause(
    fields: dict[str, Any], words: str, tokenizer: ModelTokenizer, grammars: GrammarChecker
) -> None:
    with pytest.raises(QuireError) as error:
        await over_http(tokenizer, grammars=grammars, prompt="a", **fields)
    assert str(error.value) == f"{error.value.field}: {words}"


HOSTILE: dict[str, dict[str, Any]] = {
    "large": {"json_schema": {"enum": [f"value {number}" for number in range(450_000)]}},
    "large text": {"json_schema": " " * 10_000_000},
    "large regex": {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)},
    "deep": {"json_schema": '{"items":' * 20_000 + "{}" + "}" * 20_000},
    "deep brackets": {"json_schema": "[" * 100_000},
    "deep regex": {"regex": "(" * 60_000 + ")" * 60_000},
    "deep gbnf": {"grammar": "root ::= " + "(" * 60_000},
    "intersections": {"json_schema": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(30)]}},
    "doubling": {"grammar": "start: A0\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(60)) + 'A60: "a"'},
    "divisor": {"json_schema": {"type": "integer", "multipleOf": 99_999_989}},
    "chain of gbnf": {
        "grammar": "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in range(6_000)) + 'a6000 ::= "a"'
    },
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_constraints_are_refused_and_others_go_on(
    name: str, tokenizer: ModelTokenizer, grammars: GrammarChecker
) -> None:
    before = time.process_time()
    reason, _ = await refused(over_http(tokenizer, grammars=grammars, prompt="a", **HOSTILE[name]))

    assert reason is TOO_COMPLEX
    # Of this process: the check itself is in another one.
    assert time.process_time() - before < 10
    assert (await over_http(tokenizer, grammars=grammars, prompt="a", regex="a")).grammar


@pytest.mark.parametrize("first", ["", '"xyz" '], ids=["the empty text matches", "forced text is first"])
def test_a_grammar_whose_first_choice_exceeds_a_limit_is_too_complex(first: str) -> None:
    tokenizer = load_grammar_tokenizer(tiny_tokenizer().to_str(), [EOS])
    grammar = f"start: {first}" + " ".join(['("a" | /[a-z]{1,1}/)?'] * 400)
    with pytest.raises(ConstraintError) as raised:
        checked_grammar(UnvalidatedConstraint(Field.GRAMMAR, grammar), tokenizer)
    assert raised.value.problem is ConstraintProblem.TOO_COMPLEX
