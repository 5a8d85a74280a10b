"""Constraints on the output, through both protocols, and the grammars that they become."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLTokenizer

from constraint_forms import LARK, form, matches, schema_form, structured
from gateway_requests import digest_of, over_grpc, over_http, stopping
from gateway_svc.answer_constraints import digest_of_form
from gateway_svc.chats import ChatPrompt, ClientTool, ToolChoice, ToolMode
from gateway_svc.constraints import UnvalidatedConstraint, checked_grammar
from gateway_svc.field_paths import Field
from gateway_svc.grammar_checker import GrammarChecker
from gateway_svc.message_formats.description import MessageFormat, Tool
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.turn_format import TurnFormat
from gateway_svc.unvalidated_request import UnvalidatedRequest
from quire.inference.v1 import inference_pb2 as api
from svc_common.errors import QuireError
from svc_common.grammars import compile_grammar
from turn_grammars import VOCABULARIES

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANN = '{"name": "Ann", "age": 3}'
GBNF = 'root ::= "yes" | "no"'
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

SPELLINGS: list[tuple[dict[str, Any], str, str]] = [
    (schema_form(PERSON, strict=True), ANN, '{"name": "Ann"}'),
    (schema_form(OPEN, strict=True), '{"a": 1}', '{"a": 1, "b": 2}'),
    (schema_form(OPEN), '{"a": 1, "b": 2}', '{"b": 2}'),
    (form("json_schema", schema=PERSON), ANN, "{}"),
    (form("json_object", schema=PERSON), ANN, "{}"),
    (form("json_object"), '{"a": [1, null]}', "[1]"),
    (structured(json=PERSON), ANN, "{}"),
    (structured(json=json.dumps(PERSON)), ANN, "{}"),
    (structured(json_object=True), "{}", "1"),
    (structured(regex="[ab]+c"), "abc", "abcd"),
    (structured(choice=["yes", 'n"o\n']), 'n"o\n', "ye"),
    (structured(grammar=LARK), "yes", "y"),
    (structured(grammar=GBNF), "no", "y"),
    ({"guided_json": PERSON}, ANN, "{}"),
    ({"guided_json_object": True}, "{}", "[]"),
    ({"guided_regex": r"\d{3}"}, "123", "12"),
    ({"guided_choice": ["a", "b"]}, "b", "c"),
    ({"guided_grammar": LARK}, "no", "n"),
    ({"json_schema": PERSON}, ANN, "{}"),
    ({"json_schema": json.dumps(PERSON)}, ANN, "{}"),
    ({"regex": "^a|b$"}, "b", "ab"),
    ({"ebnf": GBNF}, "no", "n"),
    ({"grammar": GBNF}, "no", "n"),
    ({"grammar": 'start: RULE\nRULE: "a ::= b"'}, "a ::= b", "a"),
]


@pytest.mark.parametrize(("fields", "good", "bad"), SPELLINGS)
@pytest.mark.parametrize(
    "base", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}], ids=["text", "chat"]
)
async def test_every_spelling_over_http_becomes_a_grammar(
    base: dict[str, Any],
    fields: dict[str, Any],
    good: str,
    bad: str,
    tokenizer: ModelTokenizer,
    grammars: GrammarChecker,
    vocabulary: LLTokenizer,
) -> None:
    grammar = (await over_http(tokenizer, grammars=grammars, **base, **fields)).grammar

    assert matches(grammar, good, vocabulary)
    assert not matches(grammar, bad, vocabulary)


CONSTRAINTS: list[tuple[api.Constraint, dict[str, Any]]] = [
    (api.Constraint(json_schema=json.dumps(PERSON)), schema_form(PERSON)),
    (api.Constraint(json_object=api.JsonObject()), form("json_object")),
    (api.Constraint(regex="a|b"), structured(regex="a|b")),
    (api.Constraint(grammar=LARK), structured(grammar=LARK)),
    (api.Constraint(gbnf=GBNF), {"grammar": GBNF}),
    (api.Constraint(choice=api.Choices(choices=["a", "é"])), structured(choice=["a", "é"])),
]


@pytest.mark.parametrize(("constraint", "fields"), CONSTRAINTS, ids=lambda one: "" if isinstance(one, dict) else None)
async def test_equal_constraints_of_both_protocols_are_one_request(
    constraint: api.Constraint, fields: dict[str, Any], tokenizer: ModelTokenizer, grammars: GrammarChecker
) -> None:
    plain = await over_grpc(tokenizer, text="a", **stopping(max_tokens=16))
    one = await over_grpc(tokenizer, grammars=grammars, text="a", constraint=constraint, **stopping(max_tokens=16))
    other = await over_http(tokenizer, grammars=grammars, prompt="a", **fields)

    assert one.grammar == other.grammar != ""
    assert digest_of(one, tokenizer) == digest_of(other, tokenizer) != digest_of(plain, tokenizer)


async def test_a_version_that_makes_another_grammar_takes_it_for_the_same_request(
    tokenizer: ModelTokenizer, grammars: GrammarChecker
) -> None:
    asked = await over_http(tokenizer, grammars=grammars, prompt="a", regex="a|b")
    other = await over_http(tokenizer, grammars=grammars, prompt="a", regex="b|a")
    of_next_version = replace(asked, grammar='start: "a" | "b"', turn=TurnFormat(MessageFormat(), (Tool("f"),)))

    assert digest_of(of_next_version, tokenizer) == digest_of(asked, tokenizer) != digest_of(other, tokenizer)


async def test_the_tools_and_their_choice_are_a_part_of_the_request() -> None:
    tool = ClientTool("f", parameters='{"type": "object"}', path="tools[0].function")
    forms: list[dict[str, Any]] = [
        {},
        {"tools": [tool]},
        {"tools": [replace(tool, parameters=None)]},
        {"tools": [replace(tool, is_strict=True)]},
        {"tools": [tool], "tool_choice": ToolChoice(ToolMode.REQUIRED)},
        {"tools": [tool], "tool_choice": ToolChoice(ToolMode.NAMED, "f")},
        {"tools": [tool], "parallel_tool_calls": False},
    ]
    neutral: list[dict[str, Any]] = [
        {"tools": [replace(tool, path="generation.chat.tools[0]", names={"name": "function.name"})]},
        {"tools": [tool], "tool_choice": ToolChoice(), "parallel_tool_calls": True},
    ]

    def digest(**fields: Any) -> str:
        return digest_of_form(UnvalidatedRequest(prompt=ChatPrompt([], **fields)))

    assert len({digest(**each) for each in forms}) == len(forms)
    assert {digest(**each) for each in neutral} == {digest(tools=[tool])}
    assert digest(tools=[tool], tool_choice=ToolChoice(ToolMode.NONE)) == digest() == ""


@pytest.mark.parametrize("fields", [form("text"), {"guided_json_object": False}, {"response_format": None}])
async def test_neutral_values_are_no_constraint(fields: dict[str, Any], tokenizer: ModelTokenizer) -> None:
    assert (await over_http(tokenizer, prompt="a", **fields)).grammar == ""


@pytest.mark.parametrize("name", ["default", "const", "enum", "example", "examples", "properties", "$defs"])
async def test_a_property_may_have_the_name_of_a_keyword(
    name: str, tokenizer: ModelTokenizer, grammars: GrammarChecker, vocabulary: LLTokenizer
) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    fields = structured(
        json={"type": "object", "properties": {name: inner, "minProperties": {"type": "integer"}}},
        disable_additional_properties=True,
    )
    grammar = (await over_http(tokenizer, grammars=grammars, prompt="a", **fields)).grammar

    assert matches(grammar, f'{{"{name}": {{"b": 1}}, "minProperties": 3}}', vocabulary)
    assert not matches(grammar, f'{{"{name}": {{"c": 1}}}}', vocabulary)
    assert not matches(grammar, '{"additionalProperties": 1}', vocabulary)

    fields = {"guided_json": {"properties": {name: {"minProperties": 3}}}}
    with pytest.raises(
        QuireError, match=re.escape(f"at #/properties/{name}/minProperties: the keyword is not supported")
    ):
        await over_http(tokenizer, grammars=grammars, prompt="a", **fields)


@pytest.mark.parametrize("name", ["discriminator", "nullable", "title", "x-order"])
async def test_annotations_in_a_schema_are_ignored(
    name: str, tokenizer: ModelTokenizer, grammars: GrammarChecker, vocabulary: LLTokenizer
) -> None:
    asked = await over_http(tokenizer, grammars=grammars, prompt="a", guided_json={"type": "integer", name: "x"})
    assert matches(asked.grammar, "12", vocabulary)


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({}, "[1, 2,3]", "[1,  2]"),
        ({}, "[1]", "[\n1]"),
        ({"disable_any_whitespace": True}, "[1,2]", "[1, 2]"),
        ({"whitespace_pattern": r"[ \n]{0,2}"}, "[1,\n 2]", "[1,   2]"),
    ],
)  # fmt: skip
async def test_whitespace_in_json_is_bounded(
    options: dict[str, Any],
    good: str,
    bad: str,
    tokenizer: ModelTokenizer,
    grammars: GrammarChecker,
    vocabulary: LLTokenizer,
) -> None:
    fields = structured(json={"type": "array", "items": {"type": "integer"}}, **options)
    grammar = (await over_http(tokenizer, grammars=grammars, prompt="a", **fields)).grammar

    assert matches(grammar, good, vocabulary)
    assert not matches(grammar, bad, vocabulary)


async def test_objects_can_be_closed(
    tokenizer: ModelTokenizer, grammars: GrammarChecker, vocabulary: LLTokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": True}}}}
    fields = structured(json=schema, disable_additional_properties=True)
    grammar = (await over_http(tokenizer, grammars=grammars, prompt="a", **fields)).grammar

    assert matches(grammar, '{"a": {"b": 1}}', vocabulary)
    assert not matches(grammar, '{"a": {"c": 1}}', vocabulary)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (Field.REGEX, "<think>(yes|no)</think>"),
        (Field.GRAMMAR, 'start: "a<tool_call>" /[a-z]+/'),
        (Field.GBNF, 'root ::= "[TOOL_CALLS]" [a-z]+'),
        (Field.JSON_SCHEMA, '{"const": "<think>"}'),
        (Field.CHOICE, ""),
    ],
)
def test_a_text_may_have_to_begin_with_the_characters_of_a_control_token(field: Field, text: str) -> None:
    vocabulary = VOCABULARIES["tokens"]
    choices = ("<|python_tag|>",) if field is Field.CHOICE else ()
    grammar = checked_grammar(UnvalidatedConstraint(field, text, choices), vocabulary.for_grammars)
    beginning = {Field.REGEX: "<think>yes", Field.GRAMMAR: "a<tool_call>b", Field.GBNF: "[TOOL_CALLS]c"}
    spelled = [token for letter in beginning.get(field, "") for token in vocabulary.encode(letter)]
    assert compile_grammar(vocabulary.for_grammars, grammar).validate_tokens(spelled) == len(spelled)


async def test_a_schema_may_refer_to_itself_beside_other_values(
    tokenizer: ModelTokenizer, grammars: GrammarChecker, vocabulary: LLTokenizer
) -> None:
    definitions = {"list": {"anyOf": [{"$ref": "#/$defs/other"}, {"type": "null"}]}, "other": {"$ref": "#/$defs/list"}}
    schema = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/other"}, {"$ref": "#"}]}, "$defs": definitions}
    grammar = (await over_http(tokenizer, grammars=grammars, prompt="a", guided_json=schema)).grammar

    assert matches(grammar, "[null, [[], null]]", vocabulary)
    assert not matches(grammar, "[1]", vocabulary)
