"""Grammars of arguments: whatever they admit is valid by the tool's schema, or the schema is refused by name."""

import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from gateway_svc.message_formats.description import MessageFormat, Tool
from gateway_svc.message_formats.formats import TOOL_FORMATS
from gateway_svc.message_formats.grammar import CallRule, TurnGrammar
from gateway_svc.message_formats.parameter_values import UnsupportedParameters
from turn_grammars import BY_PARAMETER, VOCABULARIES, Call, calls_of, random_turn, written

each_format = pytest.mark.parametrize("name", TOOL_FORMATS)
each_kind = pytest.mark.parametrize("kind", VOCABULARIES)
each_parameter_format = pytest.mark.parametrize("name", BY_PARAMETER)
"""The formats in which each argument is written by itself."""


def grammar_of(name: str, *tools: Tool, kind: str = "text", calls: CallRule = CallRule.REQUIRED) -> TurnGrammar:
    message_format = MessageFormat(TOOL_FORMATS[name])
    return TurnGrammar(message_format, tools, calls, VOCABULARIES[kind].control_tokens)


def tool_with(schema: Any, **others: Any) -> Tool:
    """A tool with one argument."""
    return Tool("f", {"type": "object", "properties": {"a": schema}, "required": ["a"], **others})


def admits(name: str, tool: Tool, argument: Any) -> bool:
    return VOCABULARIES["text"].admits(grammar_of(name, tool), written(name, ("f", {"a": argument})))


SHORT = {"type": "string", "maxLength": 3}
SCHEMAS: dict[str, Any] = {
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,3}$"},
    "pattern that is searched": {"type": "string", "pattern": "b|cd", "maxLength": 6},
    "pattern with slashes and lines": {"type": "string", "pattern": "^/[a-c]\\n?/$"},
    "pattern and length": {"type": "string", "pattern": r"^\d+$", "minLength": 3, "maxLength": 4},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email", "maxLength": 12},
    "hostname": {"type": "string", "format": "hostname", "maxLength": 12},
    "uri": {"type": "string", "format": "uri", "maxLength": 20},
    "enum": {"enum": ["a", "b c", 1, None, True, [1], {"b": 2}]},
    "enum of one type": {"type": "integer", "enum": [1, "2", 3.5, None]},
    "enum whose texts are read as others": {"enum": ["1", 2, "true", False, "null", "x", " y"]},
    "const": {"const": "x\ny"},
    "const and its type": {"type": ["string", "null"], "const": "a"},
    "text or bounded number": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 5}, SHORT]},
    "text or number": {"type": ["string", "number"], "maxLength": 3},
    "text or word": {"anyOf": [SHORT, {"type": "boolean"}, {"type": "null"}]},
    "text or constant": {"anyOf": [SHORT, {"const": 7}, {"const": [1]}]},
    "text or list": {"anyOf": [SHORT, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
    "text or object": {
        "anyOf": [SHORT, {"type": "object", "properties": {"b": {"const": 2}}, "additionalProperties": False}]
    },
    "patterns of different texts": {"anyOf": [{"pattern": "^a{1,3}$"}, {"pattern": "^b{1,3}$"}], "type": "string"},
    "one of apart": {"oneOf": [{"type": "string", "pattern": "^a$"}, {"type": "null"}]},
    "one of constants": {"oneOf": [{"const": "a"}, {"const": "b"}, {"enum": [1, 2]}]},
    "all of": {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}, {"pattern": "^[ab]*$"}]},
    "all of one": {"allOf": [{"$ref": "#/$defs/kind"}], "description": "d", "default": "x"},
    "type beside options": {"type": ["string", "integer"], "anyOf": [{"enum": ["a", 1, None]}, {"const": "b"}]},
    "reference": {"$ref": "#/$defs/kind", "description": "d"},
    "reference beside keywords": {"$ref": "#/$defs/short", "minLength": 2},
    "reference to a number": {"anyOf": [{"$ref": "#/$defs/level"}, {"type": "null"}]},
    "list of references": {"type": "array", "items": {"$ref": "#/$defs/kind"}, "minItems": 1, "maxItems": 2},
    "object": {
        "type": "object",
        "properties": {"b": {"$ref": "#/$defs/level"}, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
}
DEFINITIONS = {
    "kind": {"type": "string", "enum": ["x", "y"]},
    "short": SHORT,
    "level": {"type": "integer", "minimum": 1, "maximum": 9},
}


@each_parameter_format
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_whatever_a_grammar_admits_is_valid(schema: Any, name: str) -> None:
    tool = tool_with(schema, **{"$defs": DEFINITIONS})
    vocabulary, grammar = VOCABULARIES["text"], grammar_of(name, tool)
    valid = jsonschema.Draft202012Validator(
        tool.parameters, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for seed in range(6):
        tokens = random_turn(vocabulary, replace(grammar, is_parallel=False), random.Random(seed))
        ((_, arguments),) = calls_of(vocabulary.parse(grammar, tokens))
        assert list(valid.iter_errors(arguments)) == [], vocabulary.tokenizer.decode(tokens)


WRITTEN: list[tuple[Any, list[Any], list[Any]]] = [
    (SCHEMAS["length"], ["ab", "a\nb\nc", "äöüß€"], ["a", "abcdef"]),
    (SCHEMAS["pattern that is searched"], ["b", "acda", "b\n\n"], ["a", "c d"]),
    (SCHEMAS["pattern with slashes and lines"], ["/a/", "/b\n/"], ["a", "/d/"]),
    (SCHEMAS["date"], ["2024-02-29", "2023-12-31"], ["2023-02-29", "2023-13-01", "today"]),
    (SCHEMAS["email"], ["a.b@c.de"], ["a", "a@", "@b"]),
    (SCHEMAS["uri"], ["https://a.b/c?d=e#f"], ["a b", "/a"]),
    (SCHEMAS["text or bounded number"], [3, 5, "abc", "a3", ""], [2, 6, "abcd"]),
    (SCHEMAS["text or word"], ["tru", "a", True, False, None], ["abcd"]),
    (SCHEMAS["text or constant"], ["a", 7, [1]], [8, [2], "abcd"]),
    (SCHEMAS["text or list"], ["a", [], [1, 2]], [["b"], "abcd"]),
    (SCHEMAS["text or object"], ["a", {}, {"b": 2}], [{"b": 1}, {"c": None}]),
    (SCHEMAS["all of"], ["ab", "bab"], ["a", "abab", "xx"]),
    (SCHEMAS["reference beside keywords"], ["ab", "abc"], ["a", "abcd"]),
    ({"type": ["string", "null"]}, ["x\ny", None], []),
    ({}, [[1], {"a": 1}, "x", 1.5, None], []),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["z", 1], []),
    ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [[], [1]], [[1, 2], ["a"]]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 1}, [[1]], [[], [1, 2]]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}, [[1, 2]], [[], [1], [1, 2, 3]]),
]


@each_parameter_format
@pytest.mark.parametrize(("schema", "admitted", "refused"), WRITTEN)
def test_valid_arguments_are_admitted_and_others_are_not(
    schema: Any, admitted: list[Any], refused: list[Any], name: str
) -> None:
    tool = tool_with(schema, **{"$defs": DEFINITIONS})
    assert [each for each in admitted if not admits(name, tool, each)] == []
    assert [each for each in refused if admits(name, tool, each)] == []


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 50}, {}])
def test_a_text_ends_where_the_parser_sees_its_end(schema: Any) -> None:
    tool = tool_with(schema)
    for text in ("a</b><parameter>\n", "a <parameter=b>", "</function", "\n"):
        assert admits("qwen3_coder", tool, text)
    for text in ("a</parameter>b", "a\n<parameter=b>", "<parameter=b>", "a\n</function>", "</function>\n</tool_call>"):
        assert not admits("qwen3_coder", tool, text)


@each_kind
def test_text_before_calls_is_none_that_begins_some(kind: str) -> None:
    tool = tool_with({"const": 1})
    vocabulary, grammar = VOCABULARIES[kind], grammar_of("qwen3_coder", tool, kind=kind, calls=CallRule.AUTO)
    call = "<function=f>\n<parameter=a>\n2\n</parameter>\n</function>"
    for text in ("", "Call <function=f>.", "a\n <function=f>"):
        assert vocabulary.admits(grammar, text)
        assert vocabulary.admits(grammar, text + written("qwen3_coder", ("f", {"a": 1})))
    for text in (call, f"\n {call}", f"a\n\n{call}", f"{call}\n{written('qwen3_coder', ('f', {'a': 1}))}"):
        assert not vocabulary.admits(grammar, text)


NOT_WRITTEN: dict[str, tuple[Any, str]] = {
    "format": ({"type": "string", "format": "ipv6"}, "a: the format 'ipv6' is not supported"),
    "not": ({"type": "string", "not": {"const": "a"}}, "a: not is not supported"),
    "look-around": ({"type": "string", "pattern": "a(?=b)"}, r"a: \(\?= in pattern is not supported"),
    "anchor": ({"type": "string", "pattern": "^a|b"}, r"a: \^ and \$ in pattern are supported only"),
    "length": ({"type": "string", "maxLength": -1}, "a: maxLength must be an integer"),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 1}, "a: maxLength must not be below minLength"),
}
NOT_FLATTENED: dict[str, tuple[Any, str]] = {
    "enum and length": ({"enum": ["a"], "minLength": 2}, "a: minLength beside enum is not supported"),
    "a keyword twice": ({"$ref": "#/$defs/short", "maxLength": 2}, "a: maxLength in two schemas"),
    "properties and others": (
        {"allOf": [{"properties": {}}, {"additionalProperties": False}]},
        "a: additionalProperties in two schemas",
    ),
    "one of not apart": ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "a: oneOf whose schemas may match the same"),
    "no reference": ({"$ref": "#/$defs/none"}, r"a: \$ref '#/\$defs/none' is not supported"),
    "reference to itself": ({"$ref": "#/properties/a"}, "a: schemas are nested too deeply"),
    "no value": ({"allOf": [{"type": "string"}, {"type": "null"}]}, "a: no value is allowed"),
    "false": (False, "a: no value is allowed"),
    "no schema": (3, "a: a schema must be an object, true or false"),
    "no options": ({"anyOf": []}, "a: anyOf must be an array that is not empty"),
    "many": ({"allOf": [{"anyOf": [{"minLength": 1}] * 9}, {"anyOf": [{"maxLength": 9}] * 9}]}, "a: more than 64"),
}


@pytest.mark.parametrize(("schema", "message"), (NOT_WRITTEN | NOT_FLATTENED).values(), ids=NOT_WRITTEN | NOT_FLATTENED)
def test_what_a_tag_cannot_hold_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(UnsupportedParameters, match=f"parameters of f: {message}"):
        grammar_of("qwen3_coder", tool_with(schema, **{"$defs": DEFINITIONS})).to_lark()


@pytest.mark.parametrize(("schema", "message"), NOT_FLATTENED.values(), ids=NOT_FLATTENED)
def test_what_a_keyword_cannot_hold_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(UnsupportedParameters, match=f"parameters of f: {message}"):
        grammar_of("pythonic", tool_with(schema, **{"$defs": DEFINITIONS})).to_lark()


@each_parameter_format
def test_arguments_that_are_not_listed_have_the_schema_of_the_others(name: str) -> None:
    tool = Tool("f", {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}, "required": ["a"]})
    vocabulary, grammar = VOCABULARIES["text"], grammar_of(name, tool)
    text = written(name, ("f", {"a": 1, "b": 2}))
    assert vocabulary.admits(grammar, text)
    assert calls_of(vocabulary.parse(grammar, vocabulary.encode(text))) == [("f", {"a": 1, "b": 2})]
    for arguments in ({"b": 2}, {"a": 10}, {"a": 1, "b": "c"}, {"a": "1x"}):
        assert not vocabulary.admits(grammar, written(name, ("f", arguments)))


def test_a_grammar_leaves_out_what_does_not_restrict_arguments() -> None:
    properties = {
        "description": {"type": "string", "description": "long", "examples": ["a"]},
        "title": {"enum": [{"title": 1}], "default": {"title": 1}},
    }
    tool = Tool("f", {"type": "object", "title": "t", "properties": properties, "required": ["title"]})
    grammar = grammar_of("hermes", tool)
    assert "long" not in grammar.to_lark()
    assert VOCABULARIES["text"].admits(grammar, written("hermes", ("f", {"description": "x", "title": {"title": 1}})))
    assert not VOCABULARIES["text"].admits(grammar, written("hermes", ("f", {"description": 1, "title": {"title": 1}})))
    assert not VOCABULARIES["text"].admits(grammar, written("hermes", ("f", {"title": {}})))


@each_kind
@each_format
def test_arguments_of_an_open_schema_may_have_any_names(name: str, kind: str) -> None:
    vocabulary = VOCABULARIES[kind]
    listed = {"a": {"type": "integer"}}
    calls: list[Call] = [("f", {"x": "y", "n": "z"}), ("f", {}), ("g", {"a": 1, "b": "c"}), ("g", {"b": "c"})]
    tools = (
        Tool("f", {"type": "object", "additionalProperties": True}),
        Tool("g", {"type": "object", "properties": listed, "additionalProperties": True}),
    )
    grammar = grammar_of(name, *tools, kind=kind, calls=CallRule.AUTO)
    text = written(name, *calls)
    assert vocabulary.admits(grammar, text)
    assert calls_of(vocabulary.parse(grammar, vocabulary.encode(text))) == calls
    required = replace(grammar, calls=CallRule.REQUIRED)
    assert not vocabulary.admits(required, written(name, ("g", {"a": "c"})))


@each_parameter_format
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"a\nb": {}}}, r"parameters of f: the name 'a\\nb' is not supported"),
        ({"properties": {"a>b": {}}}, "the name 'a>b' is not supported"),
        ({"properties": {"": {}}}, "the name '' is not supported"),
        ({"$ref": "#/$defs/a"}, r"parameters of f: \$ref is not supported"),
        ({"anyOf": []}, "anyOf is not supported"),
        ({"patternProperties": {}}, "patternProperties is not supported"),
        ({"maxProperties": 2}, "maxProperties is not supported"),
        ({"dependentRequired": {}}, "dependentRequired is not supported"),
        ({"required": [{}]}, "required must be an array of strings"),
    ],
)
def test_objects_that_a_format_cannot_write_are_refused(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedParameters, match=message):
        grammar_of(name, Tool("f", parameters)).to_lark()


@each_format
def test_a_required_argument_that_the_schema_does_not_list_is_refused(name: str) -> None:
    for parameters in ({"required": ["a"]}, {"properties": {"b": {}}, "required": ["b", "a"]}):
        with pytest.raises(UnsupportedParameters, match="parameters of f: required names 'a', which is not in prop"):
            grammar_of(name, Tool("f", parameters)).to_lark()
    parameters = {"required": ["a"], "additionalProperties": {"type": "integer"}}
    assert VOCABULARIES["text"].admits(grammar_of(name, Tool("f", parameters)), written(name, ("f", {"a": 1})))


@each_format
def test_keywords_that_llguidance_takes_for_something_else_are_refused(name: str) -> None:
    for keyword, value in (("minProperties", 2), ("exclusiveMinimum", True)):
        parameters = {"type": "object", "properties": {"a": {"type": "object", keyword: value}}}
        with pytest.raises(UnsupportedParameters, match=f"parameters of f: at #/properties/a/{keyword}: "):
            grammar_of(name, Tool("f", parameters)).to_lark()


@each_format
def test_arguments_are_objects(name: str) -> None:
    for kind in ("array", ["string", "null"], "string"):
        with pytest.raises(UnsupportedParameters, match="parameters of f: type must be object"):
            grammar_of(name, Tool("f", {"type": kind})).to_lark()
    grammar = grammar_of(name, Tool("f", {"type": ["object", "null"]}))
    assert VOCABULARIES["text"].admits(grammar, written(name, ("f", {})))


NESTED = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"$ref": "#/$defs/kind"}, "minItems": 1, "maxItems": 2},
        "inner": {"type": "object", "properties": {"b": {"$ref": "#/$defs/level"}, "c": {"type": "boolean"}}},
        "open": {"type": "object", "additionalProperties": {"type": "integer"}, "properties": {"d": {"const": "e"}}},
        "any": {"type": "array"},
    },
    "required": ["list"],
    "$defs": DEFINITIONS,
}


@each_kind
@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
def test_values_in_braces_have_their_schemas_at_each_level(name: str, kind: str) -> None:
    vocabulary, grammar = VOCABULARIES[kind], grammar_of(name, Tool("f", NESTED), kind=kind)
    admitted: list[dict[str, Any]] = [
        {"list": ["x"]},
        {"list": ["x", "y"], "inner": {"b": 3, "c": True}},
        {"list": ["x"], "inner": {}, "open": {"d": "e", "f": 1, "g": -2}},
        {"list": ["x"], "open": {"dd": 1}, "any": [1, "a{", None, [True], {"k": {"l": ["m"]}}]},
    ]
    for arguments in admitted:
        text = written(name, ("f", arguments))
        assert vocabulary.admits(grammar, text), text
        assert calls_of(vocabulary.parse(grammar, vocabulary.encode(text))) == [("f", arguments)]
    refused: list[dict[str, Any]] = [
        {"list": []},
        {"list": ["x", "y", "x"]},
        {"list": ["z"]},
        {"list": ["x"], "inner": {"b": 10}},
        {"list": ["x"], "inner": {"other": 1}},
        {"list": ["x"], "open": {"d": "x"}},
        {"list": ["x"], "open": {"f": "x"}},
        {"list": ["x"], "any": {}},
    ]
    for arguments in refused:
        assert not vocabulary.admits(grammar, written(name, ("f", arguments))), arguments


NOT_IN_BRACES: dict[str, tuple[Any, str]] = {
    "unique items": ({"type": "array", "uniqueItems": True}, "a: uniqueItems of an array is not supported"),
    "patterns of names": ({"type": "object", "patternProperties": {}}, "a: patternProperties of an object is not"),
    "bounds": ({"type": "array", "minItems": 2, "maxItems": 1}, "a: maxItems must not be below minItems"),
    "no bound": ({"type": "array", "minItems": "1"}, "a: minItems and maxItems must be integers"),
    "names": ({"type": "object", "properties": {"b c": {}}}, "a: the name 'b c' is not supported"),
    "a quote": ({"const": "a<escape>b"}, "a: no value of it can be written"),
    "a name that is not listed": ({"type": "object", "properties": {}, "required": ["b"]}, "a: required names 'b'"),
    "a tree": (
        {"type": "object", "properties": {"b": {"$ref": "#/properties/a"}}},
        "a: schemas are nested too deeply",
    ),
}


@pytest.mark.parametrize(
    ("schema", "message"), (NOT_IN_BRACES | NOT_FLATTENED).values(), ids=NOT_IN_BRACES | NOT_FLATTENED
)
def test_what_braces_cannot_hold_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(UnsupportedParameters, match=f"parameters of f: {message}"):
        grammar_of("functiongemma", tool_with(schema, **{"$defs": DEFINITIONS})).to_lark()
