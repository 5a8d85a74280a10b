"""Chats and their tools: values, and the messages made of them."""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
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
    tool_calls: Sequence[ToolCall | Mapping[str, Any]] = ()
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


AnyTool = Tool | CustomTool | Mapping[str, Any]
"""A mapping is a function in OpenAI's form: {"type": "function", "function": {"name": …}}."""

ToolChoice = str | AllowedTools | Mapping[str, Any]
"""A mode, the name of one tool, or several tools. A mapping is one function in OpenAI's form."""

Messages = Sequence[Message | Mapping[str, Any]]
"""A chat, oldest message first; a mapping has the fields of Message as keys, "role" and "content" at least. Its
`tool_calls` may be in OpenAI's form, and its content None beside them."""

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
    for i, message in enumerate(_items(messages, "messages")):
        if not isinstance(message, Message | Mapping):
            raise TypeError(f"messages[{i}] must be a Message or a mapping, not {type(message).__name__}")
        fields = message if isinstance(message, Mapping) else {name: getattr(message, name) for name in _FIELDS}
        if not {"role", "content"} <= fields.keys() <= set(_FIELDS):
            raise TypeError(f"messages[{i}]: a message has a role and a content, not {', '.join(fields)}")
        added, path = chat.messages.add(), f"{within}messages[{i}]."
        for name, value in fields.items():
            if name == "tool_calls":
                for number, call in enumerate(_items(value or (), f"{path}tool_calls")):
                    _set_call(added.tool_calls.add(), call, f"{path}tool_calls[{number}].")
            elif value is not None or name == "role" or (name == "content" and not fields.get("tool_calls")):
                assign(added, name, value, within=path)
    return chat


def set_chat_options(chat: pb.Chat, options: Mapping[str, Any], within: str) -> None:
    """Sets options of CHAT_OPTIONS. Raises TypeError and QuireError."""
    for name, value in options.items():
        match name:
            case _ if value is None:
                pass
            case "tools":
                for number, tool in enumerate(_items(value, f"{within}tools")):
                    _set_tool(chat.tools.add(), tool, f"{within}tools[{number}].")
            case "tool_choice" if isinstance(value, AllowedTools):
                _set_allowed_tools(chat.allowed_tools, value, f"{within}allowed_tools.")
            case "tool_choice" if isinstance(value, str) and value in _TOOL_MODES:
                chat.tool_mode = _TOOL_MODES[value]
            case "tool_choice" if isinstance(value, Mapping):
                function = _function(value, f"{within}tool_choice", "AllowedTools", {"type", "function"})
                assign(chat, "tool_name", function.get("name"), within)
            case "tool_choice":
                assign(chat, "tool_name", value, within)
            case "template_kwargs":
                assign(chat, name, json.dumps(value, ensure_ascii=False), within)
            case _:
                assign(chat, name, value, within)


def _items(given: Any, name: str) -> Sequence[Any]:
    """What is given as a list. Raises TypeError."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a list, not {type(given).__name__}")
    return list(given)


def _function(given: Mapping[str, Any], name: str, instead: str, known: Set[str]) -> Mapping[str, Any]:
    """The function of a mapping in OpenAI's form. Raises TypeError, which says what to use instead."""
    function = given.get("function")
    if given.get("type", "function") != "function" or not isinstance(function, Mapping) or not given.keys() <= known:
        raise TypeError(f'{name} must be {{"type": "function", "function": {{…}}}}, or use {instead} of quire_client')
    return function


def _call_of(given: Any, name: str) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a ToolCall or a mapping, not {type(given).__name__}")
    function = _function(given, name, "ToolCall", {"type", "function", "id"})
    return ToolCall(given.get("id", ""), function.get("name", ""), function.get("arguments", ""))


def _tool_of(given: Any, name: str) -> Tool | CustomTool:
    if isinstance(given, Tool | CustomTool):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a Tool, a CustomTool or a mapping, not {type(given).__name__}")
    function = _function(given, name, "Tool or CustomTool", {"type", "function"})
    fields = [field for field in function if field not in Tool.__dataclass_fields__]
    if fields or "name" not in function:
        raise TypeError(f"{name}.function has name, description, parameters and strict, not {', '.join(function)}")
    return Tool(**{**function, "strict": function.get("strict") or False})


def _set_call(target: pb.ToolCall, given: Any, within: str) -> None:
    call = _call_of(given, within.removesuffix("."))
    for name in ("id", "name", "arguments"):
        assign(target, name, getattr(call, name), within)
    if call.input is not None:
        assign(target, "input", call.input, within)


def _set_tool(target: pb.Tool, given: AnyTool, within: str) -> None:
    tool = _tool_of(given, within.removesuffix("."))
    assign(target, "name", tool.name, within)
    assign(target, "description", tool.description or "", within)
    if isinstance(tool, CustomTool):
        _set_input(target.custom, tool, f"{within}custom.")
        return
    if not isinstance(tool.parameters, Mapping | None):
        raise TypeError(f"{within}parameters must be a JSON schema as a mapping, not {type(tool.parameters).__name__}")
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
