"""What the answer to a request must match: the client's constraint, and for chats the calls that it must have
and the limit of its reasoning."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gateway_svc.chats import ChatPrompt, ClientTool, CustomInput, ToolChoice, ToolMode
from gateway_svc.constraint_checks import check_combination
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field
from gateway_svc.message_formats.grammar import CallRule, ReasoningRule
from gateway_svc.turn_constraints import CheckedTool, TurnConstraint
from gateway_svc.turn_format import TurnFormat
from gateway_svc.unvalidated_request import UnvalidatedRequest


def answer_constraint(
    unvalidated: UnvalidatedRequest, turn: TurnFormat | None, added_tokens: Mapping[str, int], check: FieldChecker
) -> UnvalidatedConstraint | TurnConstraint | None:
    """What the answer must match; None: nothing. `turn` is the format of the answer to a chat, None where all is text;
    `added_tokens` are the ids of the tokenizer's, by literal. Raises QuireError."""
    constraint, prompt = unvalidated.constraint, unvalidated.prompt
    if turn is None or not isinstance(prompt, ChatPrompt):
        return constraint
    choice = prompt.tool_choice or ToolChoice()
    max_reasoning_tokens = _reasoning_limit(prompt, turn, added_tokens, check)
    if choice.must_call:
        constraint = None  # the answer has no text, which alone it is about
    constrained = {tool.name: tool for tool in prompt.tools if tool.is_constrained}
    field = _constrained_field(constraint, turn, choice, constrained, max_reasoning_tokens)
    if field is None:
        return None
    check_combination(unvalidated, field, check)
    tools = _checked_tools(turn, choice, constrained)
    calls = CallRule.REQUIRED if choice.must_call else CallRule.AUTO if tools else CallRule.NONE
    tool_format, reasoning_format = turn.format.tools, turn.format.reasoning
    reasoning = ReasoningRule.NONE
    if reasoning_format is not None:
        reasoning = ReasoningRule.OPEN if turn.is_reasoning_open else ReasoningRule.OPTIONAL
    return TurnConstraint(
        field=field,
        tool_format="" if tool_format is None else tool_format.name,
        reasoning_format="" if reasoning_format is None else reasoning_format.name,
        tools=tools,
        calls=calls,
        reasoning=reasoning,
        is_parallel=not turn.has_one_call and choice.mode is not ToolMode.NAMED,
        control_tokens=turn.control_markers(added_tokens),
        answer=constraint,
        max_reasoning_tokens=max_reasoning_tokens,
    )


def _constrained_field(
    constraint: UnvalidatedConstraint | None,
    turn: TurnFormat,
    choice: ToolChoice,
    constrained: Mapping[str, ClientTool],
    max_reasoning_tokens: int | None,
) -> Field | None:
    """The field that constrains the answer, which errors name; None: there is none."""
    if choice.must_call:
        return Field.TOOL_CHOICE
    if constraint is not None:
        return constraint.field
    if turn.tools and choice.allowed:
        return Field.TOOL_CHOICE
    if turn.tools and constrained:
        return Field.TOOLS
    return None if max_reasoning_tokens is None else Field.MAX_REASONING_TOKENS


def _checked_tools(
    turn: TurnFormat, choice: ToolChoice, constrained: Mapping[str, ClientTool]
) -> tuple[CheckedTool, ...]:
    """The tools that may be called. Of those that need not be, only the arguments of strict ones are restricted, and
    texts with a grammar."""
    return tuple(
        CheckedTool(
            tool.name,
            json.dumps(tool.parameters) if choice.must_call or tool.name in constrained else None,
            _input_of(constrained.get(tool.name)),
        )
        for tool in turn.tools
        if choice.allows(tool.name)
    )


def _input_of(tool: ClientTool | None) -> UnvalidatedConstraint | None:
    """What the text that a custom tool takes must match."""
    return None if tool is None or tool.custom is None else tool.custom.constraint


def _reasoning_limit(
    prompt: ChatPrompt, turn: TurnFormat, added_tokens: Mapping[str, int], check: FieldChecker
) -> int | None:
    """How many tokens the reasoning may have; None: any number. Raises QuireError."""
    limit, reasoning = prompt.max_reasoning_tokens, turn.format.reasoning
    if limit is None or reasoning is None:
        return None
    if reasoning.end in added_tokens:
        return limit
    # A grammar counts the tokens of text, and cannot look for an end within it.
    if prompt.must_limit_reasoning:
        message = f"is not served by this model: its tokenizer has no token {reasoning.end}"
        raise check.unsupported(Field.MAX_REASONING_TOKENS, message)
    return None


# The parts between whitespace: strings as they are. To match them takes a fifth of the time of replacing whitespace.
_PARTS_OF_JSON = re.compile(r'(?:"[^"\\]*(?:\\.[^"\\]*)*"|[^"\s]+)+')


def _without_whitespace(valid_json: str) -> str:
    """The same JSON, however a client laid it out: over HTTP it is a part of the body."""
    return "".join(_PARTS_OF_JSON.findall(valid_json))


def form_size(unvalidated: UnvalidatedRequest) -> int:
    """How many characters of JSON and of grammars `digest_of_form` reads."""
    constraint, prompt = unvalidated.constraint, unvalidated.prompt
    tools = prompt.tools if isinstance(prompt, ChatPrompt) else ()
    return sum(len(tool.parameters or "") for tool in tools) + (len(constraint.text) if constraint else 0)


def digest_of_form(unvalidated: UnvalidatedRequest) -> str:
    """SHA-256, in hexadecimal, of the constraint, the tools and the limit of the reasoning as the client wrote them;
    empty without them. The request is valid.

    Fields that a client did not give are left out, so that a new one does not change the digests of old requests.
    """
    constraint, prompt = unvalidated.constraint, unvalidated.prompt
    form: dict[str, Any] = {}
    if constraint is not None:
        form["constraint"] = _given(constraint)
        if constraint.field is Field.JSON_SCHEMA:
            form["constraint"]["text"] = _without_whitespace(constraint.text)
    if isinstance(prompt, ChatPrompt) and prompt.has_tools:
        form["tools"] = [
            _given(tool) | {"parameters": _without_whitespace(tool.parameters or "")} for tool in prompt.tools
        ]
        form["tool_choice"] = _given(prompt.tool_choice or ToolChoice())
        form["parallel"] = prompt.parallel_tool_calls is not False
    if isinstance(prompt, ChatPrompt) and prompt.max_reasoning_tokens is not None:
        form["max_reasoning_tokens"] = prompt.max_reasoning_tokens
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest() if form else ""


def _given(value: UnvalidatedConstraint | ClientTool | CustomInput | ToolChoice) -> dict[str, Any]:
    """The fields that differ from their defaults, without those that only say where errors find them."""
    items = {each.name: (getattr(value, each.name), each.default) for each in fields(value) if each.compare}
    return {
        name: _given(item) if isinstance(item, CustomInput | UnvalidatedConstraint) else item
        for name, (item, default) in items.items()
        if item != default
    }
