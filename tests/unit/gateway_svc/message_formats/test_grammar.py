"""Grammars of turns: what they admit, what they refuse, and that the parser reads what they admit."""

import json
import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.message_formats.description import MessageFormat, Tool
from gateway_svc.message_formats.events import (
    ReasoningDelta,
    TextDelta,
    join_events,
)
from gateway_svc.message_formats.formats import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.message_formats.grammar import MAX_CALLS, CallRule, ReasoningRule, TurnGrammar
from gateway_svc.message_formats.lark import json_rule
from gateway_svc.message_formats.parameter_values import UnsupportedParameters
from gateway_svc.message_formats.parser import MessageParser
from svc_common.grammars import JSON_ON_ONE_LINE
from turn_grammars import BY_PARAMETER, VOCABULARIES, Call, calls_of, random_turn, with_reasoning, written

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
    },
)
TIME = Tool("get_time")
CHOICES = Tool(
    "choose",
    {
        "type": "object",
        "properties": {
            "mode": {"enum": ["a", "b c"]},
            "force": {"type": "boolean"},
            "level": {"anyOf": [{"const": 7}, {"type": "null"}]},
            "kind": {"$ref": "#/$defs/kind"},
        },
        "required": ["mode", "kind"],
        "$defs": {"kind": {"type": "string", "enum": ["x", "y"]}},
    },
)

each_format = pytest.mark.parametrize("name", TOOL_FORMATS)
each_kind = pytest.mark.parametrize("kind", VOCABULARIES)


def grammar_of(name: str, kind: str, calls: CallRule = CallRule.REQUIRED, **options: Any) -> TurnGrammar:
    tokens = VOCABULARIES[kind].control_tokens
    return TurnGrammar(with_reasoning(name), (WEATHER, TIME, CHOICES), calls, tokens, **options)


@each_kind
@each_format
def test_calls_in_the_usual_layout_are_admitted_and_read(name: str, kind: str) -> None:
    vocabulary, grammar = VOCABULARIES[kind], grammar_of(name, kind)
    calls: list[Call] = [
        ("get_weather", {"city": 'Zü"rich\\ 👍\n{'}),
        ("get_time", {}),
        ("get_weather", {"city": "", "days": 9}),
        ("choose", {"mode": "b c", "force": True, "level": None, "kind": "y"}),
    ]
    text = written(name, *calls)
    assert vocabulary.admits(grammar, text)
    assert calls_of(vocabulary.parse(grammar, vocabulary.encode(text))) == calls


PATCH = Tool("patch", is_custom=True, input_grammar='start: ("+" LINE)+\nLINE: /[^+\\n]*/ "\\n"\n')


@each_kind
@each_format
def test_a_custom_tool_takes_a_text_that_matches_its_grammar(name: str, kind: str) -> None:
    vocabulary, grammar = VOCABULARIES[kind], replace(grammar_of(name, kind), tools=(TIME, PATCH))
    for text in ('+a"\\b\n', "+\n+</p>{é\n"):
        calls: list[Call] = [("patch", {"input": text}), ("get_time", {}), ("patch", {"input": text})]
        assert vocabulary.admits(grammar, written(name, *calls)), text
        assert calls_of(vocabulary.parse(grammar, vocabulary.encode(written(name, *calls)))) == calls
    for text in ("", "a", "+a", "+a\nb\n", "+a\n "):
        assert not vocabulary.admits(grammar, written(name, ("patch", {"input": text}))), text
    assert not vocabulary.admits(grammar, written(name, ("patch", {})))


def test_a_grammar_of_a_custom_tool_is_refused_where_calls_and_answers_are_json() -> None:
    grammar = replace(grammar_of("llama3_json", "text", CallRule.AUTO, answer="start: %json {}"), tools=(PATCH,))
    with pytest.raises(UnsupportedParameters, match="the grammar of patch is not supported beside a constraint"):
        grammar.to_lark()


@each_kind
@each_format
def test_other_calls_are_refused(name: str, kind: str) -> None:
    vocabulary, grammar = VOCABULARIES[kind], grammar_of(name, kind)
    wrong: list[Call] = [
        ("get_weathe", {"city": "x"}),
        ("get_weather", {}),
        ("get_weather", {"city": "x", "days": 10}),
        ("get_weather", {"city": "x", "days": "one"}),
        ("get_weather", {"city": "x", "other": 1}),
        ("get_time", {"zone": "x"}),
        ("choose", {"mode": "c", "kind": "x"}),
        ("choose", {"mode": "a", "kind": "z"}),
        ("choose", {"mode": "a", "level": 8, "kind": "x"}),
    ]
    for one in wrong:
        assert not vocabulary.admits(grammar, written(name, one)), one
    call: Call = ("get_time", {})
    assert not vocabulary.admits(grammar, "")
    assert not vocabulary.begins(grammar, "Text ")
    assert not vocabulary.admits(grammar, written(name, call)[:-1])
    assert not vocabulary.admits(grammar, written(name, call) + " and text")
    assert not vocabulary.admits(replace(grammar, is_parallel=False), written(name, call, call))
    assert vocabulary.admits(replace(grammar, is_parallel=False), written(name, call))
    assert vocabulary.admits(grammar, written(name, *[call] * MAX_CALLS))
    assert not vocabulary.admits(grammar, written(name, *[call] * (MAX_CALLS + 1)))


@each_kind
@each_format
def test_what_a_grammar_admits_is_read_as_valid_calls(name: str, kind: str) -> None:
    vocabulary, grammar = VOCABULARIES[kind], replace(grammar_of(name, kind), tools=(CHOICES, TIME))
    for seed in range(4):
        tokens = random_turn(vocabulary, grammar, random.Random(seed))
        calls = calls_of(events := vocabulary.parse(grammar, tokens))
        assert calls
        assert not any(isinstance(event, TextDelta) for event in events)
        for tool, arguments in calls:
            assert tool in ("choose", "get_time")
            assert arguments == {} if tool == "get_time" else is_valid_choice(arguments)


def is_valid_choice(arguments: dict[str, Any]) -> bool:
    allowed: dict[str, list[Any]] = {
        "mode": ["a", "b c"],
        "force": [True, False],
        "level": [7, None],
        "kind": ["x", "y"],
    }
    return {"mode", "kind"} <= arguments.keys() and all(arguments[key] in allowed[key] for key in arguments)


@each_kind
@each_format
def test_auto_admits_any_text_or_text_and_valid_calls(name: str, kind: str) -> None:
    vocabulary, grammar = VOCABULARIES[kind], grammar_of(name, kind, CallRule.AUTO)
    calls = written(name, ("get_weather", {"city": "x"}), ("get_time", {}))
    marker = TOOL_FORMATS[name].calls.begins
    assert vocabulary.admits(grammar, "")
    assert vocabulary.admits(grammar, "Hello\n <b> [x] {y}.")
    assert vocabulary.admits(grammar, calls)
    if not TOOL_FORMATS[name].calls.is_bare:
        assert vocabulary.admits(grammar, "I look.\n" + calls)
        assert not vocabulary.begins(grammar, f"I look.{marker[0]}x")
        assert not vocabulary.admits(grammar, written(name, ("get_weather", {})))


@pytest.mark.parametrize("calls", [CallRule.AUTO, CallRule.REQUIRED])
@each_kind
def test_reasoning_stands_before_calls(kind: str, calls: CallRule) -> None:
    vocabulary = VOCABULARIES[kind]
    call = written("hermes", ("get_time", {}))
    thought = "I think {of} it.\n</think>\n\n"
    optional = grammar_of("hermes", kind, calls, reasoning=ReasoningRule.OPTIONAL)
    assert vocabulary.admits(optional, call)
    assert vocabulary.admits(optional, "<think>" + thought + call)
    opened = replace(optional, reasoning=ReasoningRule.OPEN)
    assert vocabulary.admits(opened, thought + call)
    assert not vocabulary.admits(opened, "I think")
    events = vocabulary.parse(opened, vocabulary.encode(thought + call))
    assert events[0] == ReasoningDelta("I think {of} it.")
    assert calls_of(events) == [("get_time", {})]


@pytest.mark.parametrize("rule", [ReasoningRule.OPEN, ReasoningRule.OPTIONAL])
@pytest.mark.parametrize("calls", CallRule)
@pytest.mark.parametrize("limit", [0, 1, 5, 2**32 - 1])
def test_reasoning_ends_at_its_limit(limit: int, calls: CallRule, rule: ReasoningRule) -> None:
    vocabulary = VOCABULARIES["tokens"]
    grammar = grammar_of("hermes", "tokens", calls, reasoning=rule, max_reasoning_tokens=limit)
    begin = "" if rule is ReasoningRule.OPEN else "<think>"
    rest = "</think>\n" + ("Yes." if calls is CallRule.NONE else written("hermes", ("get_time", {})))
    for length in (0, 1, 5, 6):  # the vocabulary has bytes
        assert vocabulary.admits(grammar, begin + "x" * length + rest) == (length <= limit), length
    matcher = vocabulary.matcher(grammar)
    thought = vocabulary.encode(begin) + vocabulary.encode("你好")[: min(limit, 6)]
    assert all(map(matcher.consume_token, thought))  # the limit may be within a character
    if limit <= 6:
        assert matcher.compute_ff_tokens() == vocabulary.encode("</think>")


@each_kind
def test_an_answer_of_another_grammar_stands_for_text(kind: str) -> None:
    vocabulary = VOCABULARIES[kind]
    grammar = grammar_of("hermes", kind, CallRule.AUTO, answer='start: %json {"type": "array", "items": false}')
    assert vocabulary.admits(grammar, "[]")
    assert vocabulary.admits(grammar, written("hermes", ("get_time", {})))
    assert not vocabulary.begins(grammar, "Text")
    without_calls = replace(grammar, calls=CallRule.NONE, reasoning=ReasoningRule.OPTIONAL)
    assert vocabulary.admits(without_calls, "<think>x</think>\n[]")
    assert not vocabulary.begins(without_calls, "<think>x</think>\nText")


@pytest.mark.parametrize("rule", [ReasoningRule.OPEN, ReasoningRule.OPTIONAL])
@pytest.mark.parametrize("answer", [None, 'start: %json {"type": "array", "items": false}'])
def test_after_reasoning_each_message_has_its_header(answer: str | None, rule: ReasoningRule) -> None:
    vocabulary = VOCABULARIES["tokens"]
    begin = "" if rule is ReasoningRule.OPEN else "<|channel|>analysis<|message|>"
    thought = f"{begin}Hm.<|end|><|start|>assistant"
    call = written("harmony", ("get_time", {}))
    for calls in (CallRule.NONE, CallRule.AUTO):
        grammar = grammar_of("harmony", "tokens", calls, reasoning=rule, answer=answer)
        assert vocabulary.admits(grammar, f"{thought}<|channel|>final<|message|>[]")
        assert not vocabulary.admits(grammar, f"{thought}[]")
        assert not vocabulary.begins(grammar, f"{thought}Text<|channel|>")
        assert vocabulary.admits(grammar, thought + call) is (calls is CallRule.AUTO)
        # Without reasoning the prompt may begin the text.
        assert vocabulary.admits(grammar, "[]") is (rule is ReasoningRule.OPTIONAL)


@pytest.mark.parametrize("answer", [None, "start: /[a-z]+/"])
@pytest.mark.parametrize("calls", [CallRule.NONE, CallRule.AUTO])
@pytest.mark.parametrize("name", ["granite", "hunyuan_a13b", "cohere"])
def test_markers_around_an_answer_stand_only_where_the_parser_leaves_them_out(
    name: str, calls: CallRule, answer: str | None
) -> None:
    vocabulary, reasoning = VOCABULARIES["tokens"], REASONING_FORMATS[name]
    begin, end = reasoning.answer
    grammar = replace(
        grammar_of(name, "tokens", calls, answer=answer),
        message_format=MessageFormat(TOOL_FORMATS[name], reasoning),
        reasoning=ReasoningRule.OPTIONAL,
    )
    thought = f"{reasoning.begin}Hm.{reasoning.end}"
    for rule, before in ((ReasoningRule.OPTIONAL, thought), (ReasoningRule.OPTIONAL, ""), (ReasoningRule.NONE, "")):
        of_rule = replace(grammar, reasoning=rule)
        has_markers = bool(before) or name != "granite"
        for text in (f"{before}{begin}yes{end}", f"{before}{begin}yes"):
            assert vocabulary.admits(of_rule, text) is has_markers
            if has_markers:
                events = vocabulary.parse(of_rule, vocabulary.encode(text))
                assert [event.text for event in events if isinstance(event, TextDelta)] == ["yes"]
        assert vocabulary.admits(of_rule, f"{before}yes")


_TREE = Tool("tree", {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}})
_SCHEMAS: dict[str, tuple[Any, list[str]]] = {
    "object": ({"type": "object"}, ["{}", '{"name": "Ann"}', '{"name": "get_time", "a": {"b": []}}', '{"names": 1}']),
    "listed": (
        {"type": "object", "properties": {"name": {"type": "string"}, "a": {"type": "integer"}}, "required": ["name"]},
        ['{"name": "get_weath"}', '{"name": "get_time", "a": 1}', '{"name":"get_weather","b":null}'],
    ),
    "array": ({"type": "array"}, ["[]", '["TOOL", [null, true]]', '[{"name": "Ann"}]']),
    "any": ({}, ['"a"', "-1", "true", "null", "[{}]", '{"a": 1}']),
    "string": ({"type": "string"}, ['"<b>"', '""']),
}


@pytest.mark.parametrize("schema", _SCHEMAS)
@each_kind
@each_format
def test_calls_and_answers_of_a_schema_can_both_be_written(name: str, kind: str, schema: str) -> None:
    vocabulary = VOCABULARIES[kind]
    of_schema, answers = _SCHEMAS[schema]
    tools = (WEATHER, TIME, CHOICES) if name in BY_PARAMETER else (WEATHER, TIME, CHOICES, _TREE)
    calls: list[Call] = [("get_weather", {"city": "x"}), ("choose", {"mode": "a", "kind": "x"}), ("get_time", {})]
    if _TREE in tools:
        calls.append(("tree", {"children": [{"children": []}, {}]}))
    text = written(name, *calls)
    is_json = name in ("json", "llama3_json")
    for options in (JSON_ON_ONE_LINE, {"whitespace_pattern": "[ \\n]{0,2}"}, {"whitespace_flexible": False}):
        grammar = replace(
            grammar_of(name, kind, CallRule.AUTO, answer=f"start: {json_rule(of_schema, options)}"),
            tools=tools,
            json_options=options,
        )
        is_compact = "whitespace_flexible" in options and options is not JSON_ON_ONE_LINE
        assert vocabulary.admits(grammar, _compact(text) if is_compact and is_json else text)
        for one in answers:
            assert vocabulary.admits(grammar, _compact(one) if is_compact else one), one
            assert calls_of(vocabulary.parse(grammar, vocabulary.encode(one))) == []
        if "whitespace_pattern" in options and schema == "object":
            assert vocabulary.admits(grammar, '{\n "name" :\n "get_time" }')
        if not is_json:
            break


def _compact(text: str) -> str:
    return text.replace(": ", ":").replace(", ", ",")


def test_a_marker_that_is_a_token_cannot_be_spelled() -> None:
    vocabulary = VOCABULARIES["tokens"]
    spelled = [token for letter in written("hermes", ("get_time", {})) for token in vocabulary.encode(letter)]
    assert vocabulary.matcher(grammar_of("hermes", "tokens")).validate_tokens(spelled) == 0


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=6,
)


@each_format
@settings(max_examples=25, deadline=None)
@given(arguments=st.lists(st.dictionaries(st.text(), _json_values, max_size=3), min_size=1, max_size=3))
def test_written_calls_are_read_again(name: str, arguments: list[dict[str, Any]]) -> None:
    tool = Tool("f", {"type": "object"})
    if name in BY_PARAMETER:
        # Names that these formats can write, and values of which the parameter's schema says the type.
        numbers = count()
        arguments = [
            {f"p{next(numbers)}": value for value in one.values() if "<" not in json.dumps(value)} for one in arguments
        ]
        properties = {key: type_of(value) for one in arguments for key, value in one.items()}
        tool = Tool("f", {"type": "object", "properties": properties})
    text = written(name, *(("f", one) for one in arguments))
    parser = MessageParser(MessageFormat(TOOL_FORMATS[name]), [tool])
    events = join_events([*parser.feed(text), *parser.end()])
    assert calls_of(events) == [("f", one) for one in arguments]
    assert not any(isinstance(event, TextDelta) for event in events)


def type_of(value: Any) -> dict[str, str]:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"type": names.get(type(value), "null")}
