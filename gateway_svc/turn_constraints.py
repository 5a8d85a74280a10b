"""Constraints on the answer to a chat: which tools it calls, and what its text matches, after any reasoning.

The grammar is made in the process that checks grammars: as `constraints`, this module imports neither gRPC nor the rest
of the gateway.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gateway_svc.constraints import (
    ConstraintError,
    UnvalidatedConstraint,
    checked_grammar,
    compiled_grammar,
    json_options,
)
from gateway_svc.field_paths import Field
from gateway_svc.message_formats.description import MessageFormat, Tool
from gateway_svc.message_formats.formats import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.message_formats.grammar import CallRule, ReasoningRule, TurnGrammar
from gateway_svc.message_formats.parameter_values import UnsupportedParameters
from svc_common.grammars import JSON_ON_ONE_LINE, compile_grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class CheckedTool:
    """A tool that may be called. Its arguments match `parameters`, a JSON schema as text; None: they are any object.
    The text that a custom tool takes matches `input` instead, if that is set."""

    name: str
    parameters: str | None
    input: UnvalidatedConstraint | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in it that a client wrote."""
        return (self.parameters or "", *(() if self.input is None else self.input.texts))


@dataclass(frozen=True, slots=True)
class TurnConstraint:
    """What an answer may be. `field` is what asks for it. `answer` is what text instead of calls must match.

    Formats are named, and empty where there is none. `control_tokens` are the ids of markers that are tokens.
    """

    field: Field
    tool_format: str
    reasoning_format: str
    tools: tuple[CheckedTool, ...]
    calls: CallRule
    reasoning: ReasoningRule
    is_parallel: bool
    control_tokens: Mapping[str, int]
    answer: UnvalidatedConstraint | None = None
    max_reasoning_tokens: int | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in it that a client wrote."""
        answer = () if self.answer is None else self.answer.texts
        return (*(text for tool in self.tools for text in tool.texts), *answer)


def checked_turn_grammar(turn: TurnConstraint, tokenizer: "LLTokenizer") -> str:
    """The grammar of an answer, compiled for its check. Raises ConstraintError. Call it as `checked_grammar`."""
    tools = [_checked_tool(tool, tokenizer) for tool in turn.tools]
    answer, options = None, JSON_ON_ONE_LINE
    if turn.answer is not None:
        try:
            answer, options = checked_grammar(turn.answer, tokenizer), json_options(turn.answer)
        except ConstraintError as error:
            raise error.of("", error.field or turn.answer.field) from None
    grammar = TurnGrammar(
        MessageFormat(TOOL_FORMATS.get(turn.tool_format), REASONING_FORMATS.get(turn.reasoning_format)),
        tools,
        turn.calls,
        turn.control_tokens,
        is_parallel=turn.is_parallel,
        reasoning=turn.reasoning,
        max_reasoning_tokens=turn.max_reasoning_tokens,
        answer=answer,
        json_options=options,
    )
    try:
        lark = grammar.to_lark()
    except UnsupportedParameters as error:
        raise ConstraintError(str(error), field=Field.TOOLS) from None
    checked = compiled_grammar(lark, UnvalidatedConstraint(turn.field), tokenizer)
    if turn.answer is not None:
        _check_beginnings(grammar, turn.answer.field, tokenizer)
    return checked


def _check_beginnings(grammar: TurnGrammar, field: Field, tokenizer: "LLTokenizer") -> None:
    """Raises ConstraintError where calls cannot be written, since an answer begins as they do. llguidance's lexer takes
    the longest terminal, and does not return to a shorter one that it has passed."""
    beginnings = grammar.call_beginnings()
    if not beginnings:
        return
    without_reasoning = replace(grammar, reasoning=ReasoningRule.NONE)
    matcher = compile_grammar(tokenizer, without_reasoning.to_lark())
    for text in beginnings:
        tokens = tokenizer.tokenize_str(text)
        if matcher.validate_tokens(tokens) < len(tokens):
            raise ConstraintError(
                "is not supported beside tools: its text may begin as this model's calls do", field=field
            )


def _checked_tool(tool: CheckedTool, tokenizer: "LLTokenizer") -> Tool:
    """A tool whose schema or grammar compiles by itself. Raises ConstraintError."""
    what, constraint = "grammar", tool.input
    if constraint is None and tool.parameters is not None:
        what, constraint = "parameters", UnvalidatedConstraint(Field.JSON_SCHEMA, tool.parameters)
    grammar = None
    if constraint is not None:
        try:
            grammar = checked_grammar(constraint, tokenizer)
        except ConstraintError as error:
            raise error.of(f"the {what} of {tool.name} cannot be applied: ", Field.TOOLS) from None
    if tool.input is not None:
        return Tool(tool.name, is_custom=True, input_grammar=grammar)
    any_object = {"type": "object", "additionalProperties": True}
    return Tool(tool.name, any_object if tool.parameters is None else json.loads(tool.parameters))
