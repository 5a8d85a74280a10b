"""What answers must match: limits of the reasoning, tools that are allowed, and texts of custom tools."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.answer_constraints import answer_constraint, digest_of_form
from gateway_svc.chats import ChatPrompt, ClientTool, CustomInput, ToolChoice, ToolMode
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field, contract_field_path
from gateway_svc.message_formats.description import MessageFormat, Tool
from gateway_svc.message_formats.formats import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.message_formats.grammar import CallRule
from gateway_svc.turn_constraints import CheckedTool, TurnConstraint
from gateway_svc.turn_format import TurnFormat
from gateway_svc.unvalidated_request import EndOfText, UnvalidatedRequest
from svc_common.errors import QuireError, Reason

CHECK = FieldChecker(contract_field_path)
WITHOUT_REASONING = TurnFormat(MessageFormat(TOOL_FORMATS["hermes"], None))
WITH_REASONING = TurnFormat(MessageFormat(None, REASONING_FORMATS["think"]))
TOKENS = {"<think>": 300, "</think>": 301}


def limited(limit: int | None) -> UnvalidatedRequest:
    return UnvalidatedRequest(prompt=ChatPrompt([], max_reasoning_tokens=limit))


def test_a_limit_is_a_constraint_of_its_own() -> None:
    constraint = answer_constraint(limited(7), WITH_REASONING, TOKENS, CHECK)
    assert isinstance(constraint, TurnConstraint)
    assert (constraint.max_reasoning_tokens, constraint.field) == (7, "chat.max_reasoning_tokens")
    assert answer_constraint(limited(None), WITH_REASONING, TOKENS, CHECK) is None


def test_a_model_that_does_not_reason_has_no_limit() -> None:
    assert answer_constraint(limited(7), WITHOUT_REASONING, TOKENS, CHECK) is None
    assert answer_constraint(limited(7), None, TOKENS, CHECK) is None


def test_a_limit_may_be_ignored_where_it_cannot_be_held() -> None:
    prompt = ChatPrompt([], max_reasoning_tokens=7, must_limit_reasoning=False)
    request = UnvalidatedRequest(prompt=prompt)
    assert answer_constraint(request, WITH_REASONING, {}, CHECK) is None
    assert answer_constraint(request, WITH_REASONING, TOKENS, CHECK) is not None


@pytest.mark.parametrize(
    ("tokens", "end_of_text", "field"),
    [({}, EndOfText.ENDS, "chat.max_reasoning_tokens"), (TOKENS, EndOfText.IGNORED, "stopping.ignore_eos")],
)
def test_where_a_limit_is_refused(tokens: dict[str, int], end_of_text: EndOfText, field: str) -> None:
    request = UnvalidatedRequest(prompt=ChatPrompt([], max_reasoning_tokens=0), end_of_text=end_of_text)
    with pytest.raises(QuireError) as error:
        answer_constraint(request, WITH_REASONING, tokens, CHECK)
    assert (error.value.reason, error.value.field) == (Reason.FEATURE_UNSUPPORTED, field)


def test_the_same_request_has_the_same_limit() -> None:
    digests = {digest_of_form(limited(limit)) for limit in (None, 0, 1)}
    assert len(digests) == 3
    assert "" in digests


GRAMMAR = UnvalidatedConstraint(Field.GRAMMAR, 'start: "a"')
TOOLS = (ClientTool("f"), ClientTool("g", is_strict=True), ClientTool("run", custom=CustomInput(GRAMMAR)))


def constrained(*tools: ClientTool, choice: ToolChoice | None = None) -> TurnConstraint | None:
    turn = TurnFormat(
        MessageFormat(TOOL_FORMATS["hermes"], None),
        tuple(Tool(tool.name, {"type": "object"}, tool.custom is not None) for tool in tools),
    )
    request = UnvalidatedRequest(prompt=ChatPrompt([], tools=tools, tool_choice=choice))
    constraint = answer_constraint(request, turn, TOKENS, CHECK)
    assert constraint is None or isinstance(constraint, TurnConstraint)
    return constraint


@pytest.mark.parametrize("mode", [ToolMode.AUTO, ToolMode.REQUIRED])
def test_only_allowed_tools_may_be_called(mode: ToolMode) -> None:
    constraint = constrained(*TOOLS, choice=ToolChoice(mode, allowed=("g", "f")))
    assert constraint is not None
    assert [tool.name for tool in constraint.tools] == ["f", "g"]
    assert constraint.field is Field.TOOL_CHOICE
    assert constraint.calls is (CallRule.AUTO if mode is ToolMode.AUTO else CallRule.REQUIRED)
    any_arguments, schema = None if mode is ToolMode.AUTO else '{"type": "object"}', '{"type": "object"}'
    assert [tool.parameters for tool in constraint.tools] == [any_arguments, schema]


def test_the_text_of_a_custom_tool_matches_its_grammar_whether_or_not_it_must_be_called() -> None:
    for choice in (None, ToolChoice(ToolMode.REQUIRED)):
        constraint = constrained(TOOLS[0], TOOLS[2], choice=choice)
        assert constraint is not None
        assert constraint.tools[1] == CheckedTool("run", '{"type": "object"}', GRAMMAR)
        assert GRAMMAR.text in constraint.texts
    assert constrained(ClientTool("run", custom=CustomInput())) is None


@pytest.mark.parametrize("choice", [ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.NAMED, "f")])
def test_a_constraint_on_the_text_has_no_effect_where_a_tool_must_be_called(choice: ToolChoice) -> None:
    turn = TurnFormat(MessageFormat(TOOL_FORMATS["hermes"], None), (Tool("f", {"type": "object"}),))
    prompt = ChatPrompt([], tools=(ClientTool("f"),), tool_choice=choice)
    schema = UnvalidatedConstraint(Field.JSON_SCHEMA, '{"type": "object"}')
    both = [UnvalidatedRequest(prompt=prompt, constraint=constraint) for constraint in (schema, None)]
    with_schema, without = (answer_constraint(request, turn, TOKENS, CHECK) for request in both)
    assert with_schema == without


def test_requests_differ_by_allowed_tools_and_grammars() -> None:
    prompts = [
        ChatPrompt([], tools=TOOLS),
        ChatPrompt([], tools=TOOLS, tool_choice=ToolChoice(allowed=("f",))),
        ChatPrompt([], tools=TOOLS, tool_choice=ToolChoice(allowed=("f", "g"))),
        ChatPrompt([], tools=(*TOOLS[:2], ClientTool("run", custom=CustomInput()))),
        ChatPrompt([], tools=(*TOOLS[:2], ClientTool("run"))),
    ]
    assert len({digest_of_form(UnvalidatedRequest(prompt=prompt)) for prompt in prompts}) == len(prompts)


def test_where_a_custom_tool_has_its_grammar_is_no_part_of_the_request() -> None:
    tools = [ClientTool("run", custom=CustomInput(GRAMMAR, path)) for path in ("", "tools[0].custom.format.grammar")]
    assert len({digest_of_form(UnvalidatedRequest(prompt=ChatPrompt([], tools=[tool]))) for tool in tools}) == 1


JSON = st.recursive(
    st.none() | st.integers() | st.text('a \t\n"\\{}[]:,\u2028'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a "\\:'), inner, max_size=3),
    max_leaves=10,
)


def digest_of_parameters(parameters: str) -> str:
    return digest_of_form(UnvalidatedRequest(prompt=ChatPrompt([], tools=[ClientTool("f", parameters=parameters)])))


@given(value=JSON, indent=st.sampled_from([None, 0, 2, "\t"]), is_ascii=st.booleans())
def test_the_layout_of_json_is_no_part_of_the_request(value: Any, indent: int | str | None, is_ascii: bool) -> None:
    compact = json.dumps(value, separators=(",", ":"), ensure_ascii=is_ascii)
    laid_out = f"\r\n{json.dumps(value, indent=indent, ensure_ascii=is_ascii)} "
    assert digest_of_parameters(laid_out) == digest_of_parameters(compact)


def test_whitespace_in_strings_is_a_part_of_the_request() -> None:
    texts = ['{"a": "b c"}', '{"a": "bc"}', '{"a": "b  c"}', '{"a": "b\\" c"}', '{"a": "b\\\\", "c": " "}']
    assert len({digest_of_parameters(text) for text in texts}) == len(texts)


def test_requests_keep_their_digests_from_release_to_release() -> None:
    parameters = '{ "type" : "object",\n\t"properties": {"a \\" b\\\\": {"enum": [ 1.50, "x  y\\n", null ]}} }\r\n'
    digest = "7d331317a2aa78216c20f04828ea8b41627795dee3f48b2efb0246d32b197c44"
    assert digest_of_parameters(parameters) == digest
