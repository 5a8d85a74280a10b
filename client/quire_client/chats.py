"""Chats and their tools: values, and the messages made of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.inference.v1 import inference_pb2 as pb
from quire_client.fields import assign
from quire_client.results import ToolCall


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. `role` is "system", "user", "assistant", "tool" or another of the model's template.

    `tool_calls` are those of an assistant's message; `tool_call_id` is the call whose result the content is.
    """

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object. With `strict`
    arguments are valid for it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class CustomTool:
    """A tool that the model may call and that takes a text in place of arguments. The text matches `grammar`, in Lark's
    syntax, or the regular expression `regex`; with neither it is any text."""

    name: str
    description: str | None = None
    grammar: str | None = None
    regex: str | None = None


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """A choice among the tools of a chat: the model may call only those of `names`. With the mode "required" it calls
    at least one of them."""

    names: Sequence[str]
    mode: Literal["auto", "required"] = "auto"


AnyTool = Tool | CustomTool
ToolChoice = str | AllowedTools
"""A mode, the name of one tool, or several tools."""

Messages = Sequence[Message | Mapping[str, Any]]
"""A chat, oldest message first; a mapping has the fields of Message as keys, "role" and "content" at least."""

CHAT_OPTIONS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "template_kwargs",
    "reasoning_effort",
    "max_reasoning_tokens",
)
"""Options of requests that only chats have."""

_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning")
_TOOL_MODES = {
    "auto": pb.TOOL_MODE_AUTO,
    "none": pb.TOOL_MODE_NONE,
    "required": pb.TOOL_MODE_REQUIRED,
}
_ALLOWED_TOOLS_MODES = ("auto", "required")


def chat_message(messages: Messages, within: str) -> pb.Chat:
    """The messages of a chat, whose path is `within`. Raises TypeError and QuireError."""
    chat = pb.Chat()
    for i, message in enumerate(messages):
        fields = message if isinstance(message, Mapping) else {name: getattr(message, name) for name in _FIELDS}
        if not {"role", "content"} <= fields.keys() <= set(_FIELDS):
            raise TypeError(f"messages[{i}]: a message has a role and a content, not {', '.join(fields)}")
        added, path = chat.messages.add(), f"{within}messages[{i}]."
        for name, value in fields.items():
            if name == "tool_calls":
                for number, call in enumerate(value or ()):
                    _set_call(added.tool_calls.add(), call, f"{path}tool_calls[{number}].")
            elif value is not None or name in ("role", "content"):
                assign(added, name, value, within=path)
    return chat


def set_chat_options(chat: pb.Chat, options: Mapping[str, Any], within: str) -> None:
    """Sets options of CHAT_OPTIONS. Raises TypeError and QuireError."""
    for name, value in options.items():
        match name:
            case _ if value is None:
                pass
            case "tools":
                for number, tool in enumerate(value):
                    _set_tool(chat.tools.add(), tool, f"{within}tools[{number}].")
            case "tool_choice" if isinstance(value, AllowedTools):
                _set_allowed_tools(chat.allowed_tools, value, f"{within}allowed_tools.")
            case "tool_choice" if value in _TOOL_MODES:
                chat.tool_mode = _TOOL_MODES[value]
            case "tool_choice":
                assign(chat, "tool_name", value, within)
            case "template_kwargs":
                assign(chat, name, json.dumps(value, ensure_ascii=False), within)
            case _:
                assign(chat, name, value, within)


def _set_call(target: pb.ToolCall, call: ToolCall, within: str) -> None:
    for name in ("id", "name", "arguments"):
        assign(target, name, getattr(call, name), within)
    if call.input is not None:
        assign(target, "input", call.input, within)


def _set_tool(target: pb.Tool, tool: AnyTool, within: str) -> None:
    assign(target, "name", tool.name, within)
    assign(target, "description", tool.description or "", within)
    if isinstance(tool, CustomTool):
        _set_input(target.custom, tool, f"{within}custom.")
        return
    assign(target, "parameters", "" if tool.parameters is None else json.dumps(dict(tool.parameters)), within)
    assign(target, "strict", tool.strict, within)


def _set_input(target: pb.CustomInput, tool: CustomTool, within: str) -> None:
    if tool.grammar is not None and tool.regex is not None:
        raise TypeError(f"{within}grammar and {within}regex cannot both be given: a tool has one format")
    target.SetInParent()  # without a format, too, which is any text
    for name, value in (("grammar", tool.grammar), ("regex", tool.regex)):
        if value is not None:
            assign(target, name, value, within)


def _set_allowed_tools(target: pb.AllowedTools, choice: AllowedTools, within: str) -> None:
    if isinstance(choice.names, str):
        raise TypeError(f"{within}names is a list of names, not a text")
    if choice.mode not in _ALLOWED_TOOLS_MODES:
        raise TypeError(f'{within}mode is "auto" or "required", not {choice.mode!r}')
    target.mode = _TOOL_MODES[choice.mode]
    assign(target, "names", choice.names, within)
