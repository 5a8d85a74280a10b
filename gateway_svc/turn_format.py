"""The format of one answer: what its reasoning and its calls of tools look like."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gateway_svc.chat_template import TemplateChat
from gateway_svc.chats import PromptEnd
from gateway_svc.message_formats.description import MessageFormat, Tool, XmlCalls
from gateway_svc.message_formats.formats import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.message_formats.parser import MessageParser
from gateway_svc.request_errors import unavailable
from quire.scheduler.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """`tools` are those that the answer may call. `is_reasoning_open`: the prompt ends within the reasoning.
    `has_one_call`: calls after the first one are left out. `must_call`: so is all text, which in such an answer is what
    was written of a call before its arguments, or of the marker after it, when the answer was cut."""

    format: MessageFormat
    tools: tuple[Tool, ...] = ()
    is_reasoning_open: bool = False
    has_one_call: bool = False
    must_call: bool = False

    @classmethod
    def of_prompt(
        cls,
        message_format: MessageFormat,
        chat: TemplateChat,
        prompt_tail: str,
    ) -> "TurnFormat | None":
        """The format of the answer to a chat's prompt; None where the answer is text. `prompt_tail` is the end of the
        prompt's text, with control tokens."""
        reasoning = message_format.reasoning
        if reasoning is None and message_format.channels is None and not chat.callable_tools:
            return None
        is_continued = chat.prompt_end is PromptEnd.CONTINUATION
        answer = (chat.messages[-1].get("content") or "") if is_continued else ""
        functions = [tool["function"] for tool in chat.callable_tools]
        return cls(
            # Text of a turn of messages is divided from their headers also where nothing else is looked for.
            MessageFormat(message_format.tools if functions or reasoning is None else None, reasoning),
            tuple(
                Tool(function["name"], function["parameters"], function["name"] in chat.custom_tools)
                for function in functions
            ),
            reasoning is not None and reasoning.is_open_in(prompt_tail, answer),
            chat.has_one_call,
            chat.must_call,
        )

    @classmethod
    def from_proto(cls, turn: scheduler_pb2.TurnFormat) -> "TurnFormat":
        """As the scheduler stored it. Raises QuireError where this version does not have the format."""
        if turn.tools not in ("", *TOOL_FORMATS) or turn.reasoning not in ("", *REASONING_FORMATS):
            raise unavailable("this gateway does not have the request's format of answers")
        tools = TOOL_FORMATS[turn.tools] if turn.tools else None
        reasoning = REASONING_FORMATS[turn.reasoning] if turn.reasoning else None
        return cls(
            MessageFormat(tools, reasoning),
            tuple(
                Tool(tool.name, json.loads(tool.parameters), tool.is_custom)
                if tool.parameters
                else Tool(tool.name, is_custom=tool.is_custom)
                for tool in turn.callable
            ),
            turn.is_reasoning_open,
            turn.has_one_call,
            turn.must_call,
        )

    def to_proto(self) -> scheduler_pb2.TurnFormat:
        tools, reasoning = self.format.tools, self.format.reasoning
        # Only values without JSON's notation need the schema.
        has_schemas = tools is not None and isinstance(tools.calls, XmlCalls)
        return scheduler_pb2.TurnFormat(
            tools="" if tools is None else tools.name,
            reasoning="" if reasoning is None else reasoning.name,
            is_reasoning_open=self.is_reasoning_open,
            has_one_call=self.has_one_call,
            must_call=self.must_call,
            callable=[
                scheduler_pb2.CallableTool(
                    name=tool.name,
                    parameters=json.dumps(tool.parameters, sort_keys=True) if has_schemas else "",
                    is_custom=tool.is_custom,
                )
                for tool in self.tools
            ],
        )

    def control_markers(self, added_tokens: Mapping[str, int]) -> dict[str, int]:
        """Ids of the markers that are tokens. `added_tokens` are the ids of the tokenizer's, by literal."""
        return {marker: added_tokens[marker] for marker in sorted(self.format.markers & added_tokens.keys())}

    def parser(self, control_markers: Collection[str], hidden_markers: Collection[str]) -> MessageParser:
        """A parser at the beginning of the answer. `control_markers` are those that are tokens; `hidden_markers` are
        those of them that contribute no text."""
        return MessageParser(
            self.format,
            self.tools,
            control_tokens=control_markers,
            hidden_tokens=hidden_markers,
            reasoning_is_open=self.is_reasoning_open,
        )
