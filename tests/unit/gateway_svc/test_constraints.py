"""Constraints on the output, through both protocols: the grammars that they become, and why they are refused."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway_requests import VOCAB_SIZE, digest_of, over_grpc, over_http, refused, stopping
from gateway_svc import grammar_checker, grammar_process
from gateway_svc.answer_constraints import digest_of_form
from gateway_svc.chats import ChatPrompt, ClientTool, ToolChoice, ToolMode
from gateway_svc.constraints import ConstraintError, ConstraintProblem, UnvalidatedConstraint, checked_grammar
from gateway_svc.field_paths import Field, contract_field_path
from gateway_svc.grammar_checker import MAX_CACHED, GrammarChecker
from gateway_svc.message_formats.description import MessageFormat, Tool
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.turn_format import TurnFormat
from gateway_svc.unvalidated_request import UnvalidatedRequest
from quire.inference.v1 import inference_pb2 as api
from svc_common.errors import QuireError, Reason
from svc_common.grammars import MAX_GRAMMAR_BYTES, compile_grammar, load_grammar_tokenizer
from tiny_model import EOS, tiny_tokenizer

INVALID, TOO_COMPLEX, FIELD, UNSUPPORTED = (
    Reason.GRAMMAR_INVALID,
    Reason.GRAMMAR_TOO_COMPLEX,
    Reason.INVALID_FIELD,
    Reason.FEATURE_UNSUPPORTED,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANN = '{"name": "Ann", "age": 3}'
LARK = 'start: "yes" | "no"'
GBNF = 'root ::= "yes" | "no"'


@pytest.fixture(scope="module")
def grammars(model_directory: Path) -> Iterator[GrammarChecker]:
    """The checker of the tiny model, with its process."""
    checker = GrammarChecker(model_directory / "tokenizer.json", [EOS])
    yield checker
    checker.close()


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    """The tiny vocabulary, as workers use it."""
    return load_grammar_tokenizer(tiny_tokenizer().to_str(), [EOS])


def matches(grammar: str, text: str, vocabulary: LLTokenizer) -> bool:
    """Whether a grammar takes a whole text."""
    matcher: LLMatcher = compile_grammar(vocabulary, grammar)
    token_ids = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def form(kind: str, **fields: Any) -> dict[str, Any]:
    """A response_format."""
    return {"response_format": {"type": kind, **fields}}


def schema_form(schema: Any, **fields: Any) -> dict[str, Any]:
    """A response_format with a schema."""
    return form("json_schema", json_schema={"name": "x", "schema": schema, **fields})


def structured(**fields: Any) -> dict[str, Any]:
    """A structured_outputs."""
    return {"structured_outputs": fields}


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
        {"tools": [replace(tool, path="generation.chat.tools[0]")]},
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
    ({"properties": {"a": {"not": {}}}}, "not at #/properties/a"),
    ({"type": "string", "format": "ipv7"}, "format at #"),
    ({"items": {"uniqueItems": True}}, "uniqueItems at #/items"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    ({"type": "object", "minProperties": 3, "required": ["a"]}, "minProperties at #"),
    ({"x-guidance": {"lenient": True}}, "x-guidance"),
    *(
        ({"items": {name: {}}}, f"{name} at #/items")
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
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired at #"),
    ({"$dynamicRef": "#a"}, "dynamicRef at #"),
    ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "disjoint"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 3}, "required"),
    ({"$ref": "#/nowhere"}, "/nowhere"),
    ({"$ref": "https://example.com/schema"}, "example.com"),
    ({"type": "string", "pattern": "a(?=b)"}, "at character 2"),
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
            "invalid regular expression: unclosed group (at character 901)",
        ),
        (
            {"grammar": f"start: rule\nrule: /{LONG}(/"},
            "at 2(7): invalid regular expression: unclosed group (at character 901)",
        ),
        ({"guided_json": {"$ref": f"#/{LONG}"}}, f"Pointer '/{'a' * 190} … {'a' * 184}' does not exist"),
    ],
    ids=["regex", "schema", "grammar", "reference"],
)
async def test_an_error_about_a_long_text_names_the_place_and_the_cause(
    fields: dict[str, Any], words: str, tokenizer: ModelTokenizer, grammars: GrammarChecker
) -> None:
    with pytest.raises(QuireError) as error:
        await over_http(tokenizer, grammars=grammars, prompt="a", **fields)
    assert str(error.value) == f"{error.value.field}: {words}"


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
    with pytest.raises(QuireError, match=re.escape(f"minProperties at #/properties/{name} is not supported")):
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


async def test_a_result_is_not_shared_with_another_tenant(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a check would show that another tenant has sent the same constraint."""
    asked: list[dict[str, Any]] = []
    ask = grammars._ask

    def counted(request: dict[str, Any], vocab_size: int) -> dict[str, Any]:
        asked.append(request)
        return ask(request, vocab_size)

    monkeypatch.setattr(grammars, "_ask", counted)
    constraint = UnvalidatedConstraint(Field.REGEX, "not sent before")

    for tenant in ("a", "b", "a", "b"):
        assert await grammars.grammar(constraint, VOCAB_SIZE, contract_field_path, tenant)

    assert len(asked) == 2


async def test_the_oldest_results_are_forgotten(grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_ask", lambda request, _: {"grammar": request["text"]})
    for number in range(MAX_CACHED + 10):
        constraint = UnvalidatedConstraint(Field.REGEX, f"r{number}")
        assert await grammars.grammar(constraint, VOCAB_SIZE, contract_field_path) == f"r{number}"

    assert len(grammars._results) == MAX_CACHED


async def test_a_tenant_displaces_no_result_of_another(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(request: dict[str, Any], vocab_size: int) -> dict[str, Any]:
        asked.append(request["text"])
        return {"grammar": request["text"]}

    async def check(text: str, tenant: str) -> None:
        await grammars.grammar(UnvalidatedConstraint(Field.REGEX, text), VOCAB_SIZE, contract_field_path, tenant)

    monkeypatch.setattr(grammars, "_ask", ask)
    await check("of the other", "small")
    for number in range(MAX_CACHED + 10):
        await check(f"s{number}", "large")
    asked.clear()
    await check("of the other", "small")
    await check("s0", "large")

    assert asked == ["s0"]


def test_a_check_that_waits_is_ended(monkeypatch: pytest.MonkeyPatch, vocabulary: LLTokenizer) -> None:
    monkeypatch.setattr(grammar_process, "_check", lambda *_: time.sleep(3600))
    monkeypatch.setattr(grammar_process, "CHECK_DEADLINE_SECONDS", 0.1)
    assert grammar_process._check_in_fork({}, vocabulary) == {"timed_out": True}


async def test_a_check_without_a_result_may_be_tried_again(
    model_directory: Path, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = GrammarChecker(model_directory / "tokenizer.json", [EOS])
    try:
        await over_http(tokenizer, grammars=checker, prompt="a", regex="a")
        with monkeypatch.context() as patched:
            patched.setattr(
                grammar_checker, "receive", lambda stream: grammar_process.receive(stream) and {"timed_out": True}
            )
            reason, _ = await refused(over_http(tokenizer, grammars=checker, prompt="a", regex="b"))
        assert reason is Reason.CAPACITY_EXHAUSTED
        assert (await over_http(tokenizer, grammars=checker, prompt="a", regex="b")).grammar
    finally:
        checker.close()


async def test_a_check_that_fails_in_an_unexpected_way_is_logged_without_the_text(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The tokens of a constraint that no client can send.
    constraint = UnvalidatedConstraint(Field.REGEX, "secret")
    monkeypatch.setattr("gateway_svc.grammar_checker.request_of", lambda _: {"field": "constraint.regex", "text": 7,
        "choices": [], "whitespace": "", "closes_objects": False})  # fmt: skip
    with pytest.raises(QuireError) as error:
        await grammars.grammar(constraint, VOCAB_SIZE, contract_field_path)

    assert error.value.reason is INVALID
    assert "could not be checked" in caplog.text
    assert "secret" not in caplog.text


async def test_a_checker_whose_process_ended_starts_another(model_directory: Path, tokenizer: ModelTokenizer) -> None:
    checker = GrammarChecker(model_directory / "tokenizer.json", [EOS])
    try:
        await over_http(tokenizer, grammars=checker, prompt="a", regex="a")
        assert checker._process is not None
        checker._process.kill()
        checker._process.wait()
        assert (await over_http(tokenizer, grammars=checker, prompt="a", regex="b")).grammar
    finally:
        checker.close()


async def test_a_model_without_end_of_text_has_no_constraints(model_directory: Path, tokenizer: ModelTokenizer) -> None:
    checker = GrammarChecker(model_directory / "tokenizer.json", [])
    try:
        for _ in range(2):
            assert await refused(over_http(tokenizer, grammars=checker, prompt="a", regex="a")) == (UNSUPPORTED, None)
    finally:
        checker.close()


@pytest.mark.parametrize("first", ["", '"xyz" '], ids=["the empty text matches", "forced text is first"])
def test_a_grammar_whose_first_choice_exceeds_a_limit_is_too_complex(first: str) -> None:
    tokenizer = load_grammar_tokenizer(tiny_tokenizer().to_str(), [EOS])
    grammar = f"start: {first}" + " ".join(['("a" | /[a-z]{1,1}/)?'] * 400)
    with pytest.raises(ConstraintError) as raised:
        checked_grammar(UnvalidatedConstraint(Field.GRAMMAR, grammar), tokenizer)
    assert raised.value.problem is ConstraintProblem.TOO_COMPLEX
