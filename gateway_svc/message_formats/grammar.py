"""Grammars of whole turns, in llguidance's Lark syntax: reasoning, then calls, any text, or the text of a grammar.

A marker that is a token of the tokenizer is that token in the grammar too, so that a model cannot spell it. Calls have
their usual layout; arguments are JSON by the tool's schema, which llguidance compiles.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gateway_svc.message_formats.argument_rules import (
    brace_rules,
    json_call_rule,
    keyword_rules,
    object_rule,
    tag_rules,
)
from gateway_svc.message_formats.description import (
    CUSTOM_INPUT,
    BraceCalls,
    CallSyntax,
    JsonCalls,
    Listing,
    MessageFormat,
    PythonCalls,
    Slot,
    Tool,
    XmlCalls,
)
from gateway_svc.message_formats.input_terminals import input_terminals
from gateway_svc.message_formats.lark import escaped_regex, quoted
from gateway_svc.message_formats.layout import Part, call_layout, layout_of
from gateway_svc.message_formats.parameter_values import UnsupportedParameters
from svc_common.grammars import JSON_ON_ONE_LINE

MAX_CALLS = 16
"""Calls in a turn, at most. Without a bound, a weak model may call until its output is cut."""

_ANSWER = "answer"
_SPACE = r"/[ \n]{0,4}/"
_NUMBER = "/[0-9]{1,4}/"


class CallRule(Enum):
    """Which calls a turn has."""

    NONE = "none"
    AUTO = "auto"
    """None, or some after any text. Once the marker of calls is there, calls must follow; then the turn ends."""
    REQUIRED = "required"
    """At least one, and no text."""


class ReasoningRule(Enum):
    """Whether reasoning stands at the beginning of the output."""

    NONE = "none"
    OPTIONAL = "optional"
    OPEN = "open"
    """It began at the end of the prompt."""


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """What a turn may be.

    `is_parallel` allows several calls. `answer` is the grammar of the text of a turn without calls; None: any text.
    `control_tokens` are the ids of the tokenizer's added tokens by literal. `max_reasoning_tokens` is a limit for
    reasoning whose end is one of them, without its markers; None: no limit. `json_options` are llguidance's for the
    JSON of `answer`.
    """

    message_format: MessageFormat
    tools: Sequence[Tool]
    calls: CallRule
    control_tokens: Mapping[str, int]
    is_parallel: bool = True
    reasoning: ReasoningRule = ReasoningRule.NONE
    max_reasoning_tokens: int | None = None
    answer: str | None = None
    json_options: Mapping[str, Any] = field(default_factory=lambda: JSON_ON_ONE_LINE)

    def call_beginnings(self) -> list[str]:
        """How calls without a marker begin, one for each tool."""
        tools = self.message_format.tools
        if self.calls is CallRule.NONE or tools is None or not tools.calls.is_bare:
            return []
        if isinstance(tools.calls, JsonCalls):
            opening = "[" if tools.calls.listing is Listing.ARRAY else ""
            return [f'{opening}{{"name":{quoted(tool.name)}' for tool in self.tools]
        return [f"[{tool.name}(" for tool in self.tools]

    def to_lark(self) -> str:
        """The grammar; with `answer`, llguidance's JSON object of this grammar and the other.

        Raises UnsupportedParameters. Schemas are not checked: llguidance does that when it compiles the grammar. They
        are as deep as Python's recursion allows.
        """
        # The parser takes some markers around the answer for text where no reasoning is before them.
        needs_reasoning = self._has_marked_text and not self._marks_each_answer
        turn = self._turn(has_marks=not needs_reasoning or self.reasoning is not ReasoningRule.NONE)
        start = f"{self._reasoning()} turn".strip()
        if needs_reasoning and self.reasoning is ReasoningRule.OPTIONAL:
            turn["unmarked"] = self._turn(has_marks=False)["turn"]
            start = "reasoning turn | unmarked"
        if "plain" in turn and self.reasoning is not ReasoningRule.OPEN:
            start += " | plain"
        rules = {"start": start, **turn, "TEXT": r"/(?s:.*)/"}
        if self.reasoning is not ReasoningRule.NONE:
            rules |= self._reasoning_rules()
        lark = "".join(f"{name}: {body}\n" for name, body in rules.items())
        if self.answer is None:
            return lark
        grammars = [{"lark_grammar": lark}, {"name": _ANSWER, "lark_grammar": self.answer}]
        return json.dumps({"grammars": grammars}, ensure_ascii=False)

    def _reasoning(self) -> str:
        return {ReasoningRule.NONE: "", ReasoningRule.OPTIONAL: "reasoning?", ReasoningRule.OPEN: "thought"}[
            self.reasoning
        ]

    def _reasoning_rules(self) -> dict[str, str]:
        reasoning = self.message_format.reasoning
        assert reasoning is not None, "there is a rule for it"
        return {
            "reasoning": f"{self._literal(reasoning.begin + reasoning.heading)} thought",
            **self._thought_end(reasoning.end),
            "thought": f"thought_end {self._literal(reasoning.next) or _SPACE}",
        }

    def _thought_end(self, marker: str) -> dict[str, str]:
        limit, end = self.max_reasoning_tokens, self._literal(marker)
        if limit is None:
            return self._until("thought_end", marker)
        if limit == 0:
            return {"thought_end": end}
        return {"thought_end": f"limited {end}", f"limited[max_tokens={limit}]": "TEXT"}

    def _turn(self, *, has_marks: bool) -> dict[str, str]:
        """In a turn of messages each has its markers, and `plain` is what the turn may be without them: text that the
        prompt begins. `has_marks`: there may be markers around the answer of other turns."""
        text = "TEXT" if self.answer is None else f"@{_ANSWER}"
        reasoning = self.message_format.reasoning
        has_messages = reasoning is not None and bool(reasoning.next)
        plain = {"plain": text} if has_messages else {}
        if has_messages:
            text = self._marked(text)
        elif has_marks and self._has_marked_text:
            text = f"{text} | {self._marked(text)}"
        if self.calls is CallRule.NONE:
            return {"turn": text, **plain}
        tools = self.message_format.tools
        assert tools is not None, "only a model with a format has calls"
        rules = self._call_rules(tools.calls)
        if self.calls is CallRule.REQUIRED:
            return {"turn": "calls", **rules}
        if self.answer is not None:
            return {"turn": f"calls | {text}", **plain, **rules}
        if has_messages:
            head = self._until("head", tools.calls.begins[0])
            return {"turn": f"({self._preamble()})? calls | {text}", "plain": "head more_calls | TEXT", **head, **rules}
        return {**self._text_and_calls(tools.calls, text, has_marks=has_marks), **rules}

    @property
    def _has_marked_text(self) -> bool:
        """Whether markers around the answer are tokens, which no terminal of text has."""
        reasoning = self.message_format.reasoning
        return reasoning is not None and any(self._literal(one) != quoted(one) for one in reasoning.answer)

    @property
    def _marks_each_answer(self) -> bool:
        """Whether such markers are no text where no reasoning is before them either."""
        reasoning = self.message_format.reasoning
        return reasoning is not None and (reasoning.marks_each_answer or bool(reasoning.next))

    def _marked(self, text: str) -> str:
        """Text between the markers of the answer; the turn may end without the second one."""
        reasoning = self.message_format.reasoning
        assert reasoning is not None, "it has the markers"
        begin, end = map(self._literal, reasoning.answer)
        return f"{begin} {text} ({end})?"

    def _preamble(self) -> str:
        """Text between markers before calls."""
        reasoning = self.message_format.reasoning
        assert reasoning is not None, "it has the markers"
        begin, end = reasoning.answer
        return f"{self._literal(reasoning.preamble or begin)} TEXT {self._literal(end + reasoning.next)}"

    def _text_and_calls(self, calls: CallSyntax, text: str, *, has_marks: bool) -> dict[str, str]:
        if calls.is_bare:
            # A turn that begins like a call is one.
            return {"turn": "calls | OTHER", "OTHER": r"/(?s:[^{\[\s].*)?/"}
        if calls.line_begin is None:
            turn = f"head more_calls | {text}"
            if has_marks and self._has_marked_text:
                turn = f"{self._preamble()} calls | {turn}"
            return {"turn": turn, **self._until("head", calls.begins[0])}
        # What the parser takes for the beginning of a call must have its marker.
        begin = escaped_regex(calls.line_begin)
        rules = {"PLAIN": rf"/(?s:.*)/ & ~/\s*{begin}(?s:.*)/ & ~/(?s:.*)\n{begin}(?s:.*)/"}
        return {"turn": "head more_calls | PLAIN", **self._until("head", calls.begins[0], "PLAIN"), **rules}

    def _call_rules(self, calls: CallSyntax) -> dict[str, str]:
        """The rules `calls`, and `more_calls` for calls whose first marker was there."""
        layout = layout_of(calls)
        # The first marker is that of all calls, or of each.
        begin = "" if calls.is_bare else self._literal(calls.begins[0])
        opening = layout.opening[1:] if begin else layout.opening
        is_begun_alone = not layout.opening and bool(begin)
        rules: dict[str, str] = {}
        names = []
        for index, tool in enumerate(self.tools):
            names.append(f"call_{index}")
            if isinstance(calls, JsonCalls) and calls.is_bare and self.answer is not None:
                if tool.input_grammar is not None:
                    message = f"the grammar of {tool.name} is not supported beside a constraint on the text"
                    raise UnsupportedParameters(message)
                # Either may be JSON, so both have the same terminals: after a longer one, such as the whole text before
                # the arguments, the answer could not begin as the call does.
                rules[f"call_{index}"] = json_call_rule(tool, calls.arguments_key, self.json_options)
                continue
            parts = call_layout(calls, tool.name)
            arguments = f"arguments_{index}"
            rules[f"call_{index}"] = self._sequence(parts[1:] if is_begun_alone else parts, arguments)
            rules |= self._argument_rules(calls, tool, arguments)
        next_call = " ".join((self._sequence(layout.separator), begin if is_begun_alone else "", "call"))
        more = f"({next_call}){{0,{MAX_CALLS - 1}}}" if self.is_parallel else ""
        return {
            "calls": f"{begin} more_calls",
            "more_calls": f"{self._sequence(opening)} call {more} {self._sequence(layout.closing)}",
            "call": " | ".join(names),
            **rules,
        }

    def _argument_rules(self, calls: CallSyntax, tool: Tool, name: str) -> dict[str, str]:
        if tool.input_grammar is not None:
            return self._input_rules(calls, tool.name, tool.input_grammar, name)
        if isinstance(calls, XmlCalls):
            return tag_rules(calls, tool, name, self._literal)
        if isinstance(calls, PythonCalls):
            return keyword_rules(tool, name)
        if isinstance(calls, BraceCalls):
            return brace_rules(calls, tool, name, self._literal)
        return {name: object_rule(tool)}

    def _input_rules(self, calls: CallSyntax, tool: str, grammar: str, name: str) -> dict[str, str]:
        """Rules for the arguments of a custom tool, whose text matches a grammar. Raises UnsupportedParameters."""
        match calls:
            case XmlCalls():
                opening, closing = calls.opening(CUSTOM_INPUT), calls.closing
            case PythonCalls():
                opening, closing = f'{CUSTOM_INPUT}="', '"'
            case BraceCalls():
                opening, closing = f"{CUSTOM_INPUT}:{calls.quote}", calls.quote
            case _:
                opening, closing = f'{{"{CUSTOM_INPUT}": "', '"}'
        terminal, after = f"{name}_input".upper(), ""
        if self._literal(closing) != quoted(closing):  # a terminal has no tokens, and ends before one
            closing, after = "", self._literal(closing)
        terminals = input_terminals(
            grammar, terminal, tool, closing, is_json=not isinstance(calls, BraceCalls | XmlCalls)
        )
        return {name: f"{self._literal(opening)} {terminal} {after}".rstrip(), **terminals}

    def _sequence(self, parts: Sequence[Part], arguments: str = "") -> str:
        slots = {Slot.ARGUMENTS: arguments, Slot.NUMBER: _NUMBER}
        return " ".join(slots[part] if isinstance(part, Slot) else self._literal(part) for part in parts if part)

    def _until(self, name: str, marker: str, text: str = "TEXT") -> dict[str, str]:
        """A rule for the text of a terminal with the first marker after it."""
        literal = self._literal(marker)
        return {name: f"{text} {literal}"} if literal != quoted(marker) else {f"{name}[lazy]": f"{text} {literal}"}

    def _literal(self, text: str) -> str:
        """A text in which markers may stand; empty for an empty text."""
        markers = sorted(self.message_format.markers & self.control_tokens.keys())
        parts = re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]
        return " ".join(
            f"<[{self.control_tokens[part]}]>" if part in markers else quoted(part) for part in parts if part
        )
