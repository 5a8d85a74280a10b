"""The fields of /v1/chat/completions that make the prompt: messages, tools, and variables of the template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.chats import ChatMessage, ChatPrompt, ClientTool, PromptEnd, ToolCall, ToolChoice, ToolMode
from gateway_svc.field_paths import Field
from gateway_svc.openai_http import unsupported_fields
from gateway_svc.openai_http.json_fields import JsonFields, as_object, invalid
from gateway_svc.openai_http.responses import TOOL_CALLS, CallFormat
from svc_common.errors import QuireError, Reason

# Of the fields, by their names in the body.
NAMES: Mapping[str, str] = {
    Field.MESSAGES: "messages",
    Field.TOOLS: "tools",
    Field.TOOL_CHOICE: "tool_choice",
    Field.TEMPLATE_VARIABLES: "chat_template_kwargs",
    Field.REASONING_EFFORT: "reasoning_effort",
    Field.PROMPT_END: "continue_final_message",
}

# Before OpenAI's API had tools.
_LEGACY_NAMES: Mapping[str, str] = {Field.TOOLS: "functions", Field.TOOL_CHOICE: "function_call"}

_CHOICES = {mode.value: ToolChoice(mode) for mode in ToolMode if mode is not ToolMode.NAMED}


@dataclass(frozen=True, slots=True)
class ChatFields:
    """The chat of a body; None where it has no messages. `names` has fields that this body spells in its own way."""

    prompt: ChatPrompt | None
    names: Mapping[str, str]
    calls: CallFormat = TOOL_CALLS
    """How the answer has calls."""


def read_chat(fields: JsonFields) -> ChatFields:
    """Reads the chat of a body. Raises QuireError."""
    messages = fields.objects("messages")
    if messages is None:
        return ChatFields(None, {})
    for new, old in (("tools", "functions"), ("tool_choice", "function_call")):
        if fields.has(new) and fields.has(old):
            raise invalid(old, f"must not be beside {new}")
    is_legacy = fields.has("functions")
    tools = _functions(fields) if is_legacy else tuple(map(_tool, fields.objects("tools") or ()))
    has_legacy_choice = fields.has("function_call")
    parallel = fields.flag("parallel_tool_calls") if fields.has("parallel_tool_calls") else None
    prompt = ChatPrompt(
        messages=_messages(messages),
        tools=tools,
        tool_choice=_legacy_choice(fields) if has_legacy_choice else _tool_choice(fields),
        # A message has one function_call.
        parallel_tool_calls=False if is_legacy else parallel,
        template_variables=_json_text("chat_template_kwargs", fields.raw("chat_template_kwargs")),
        reasoning_effort=fields.string("reasoning_effort"),
        prompt_end=_prompt_end(fields),
    )
    names = {Field.TOOLS: is_legacy, Field.TOOL_CHOICE: has_legacy_choice}
    is_named = prompt.tool_choice is not None and prompt.tool_choice.mode is ToolMode.NAMED
    return ChatFields(
        prompt,
        {which: _LEGACY_NAMES[which] for which, is_old in names.items() if is_old},
        CallFormat(is_legacy, is_named),
    )


def _prompt_end(fields: JsonFields) -> PromptEnd:
    has_generation_prompt = not fields.has("add_generation_prompt") or fields.flag("add_generation_prompt")
    if not fields.flag("continue_final_message"):
        return PromptEnd.ANSWER if has_generation_prompt else PromptEnd.MESSAGE
    if has_generation_prompt:
        raise invalid("continue_final_message", "needs add_generation_prompt to be false")
    return PromptEnd.CONTINUATION


def _messages(messages: Sequence[JsonFields]) -> list[ChatMessage]:
    read: list[ChatMessage] = []
    for message in messages:
        one = _message(message, len(read))
        if one.role == "function":  # the result of the latest call of this function
            calls = (call.id for last in reversed(read) for call in last.tool_calls if call.name == one.name)
            one = ChatMessage("tool", one.content, (), next(calls, None), one.name, path=one.path)
        read.append(one)
    return read


def _message(message: JsonFields, message_index: int) -> ChatMessage:
    message.reject_unsupported(unsupported_fields.MESSAGE)
    role = message.string("role")
    if role is None:
        raise invalid(message.field_path("role"), "must be given")
    tool_calls = tuple(_tool_call(call) for call in message.objects("tool_calls") or ())
    if (function := message.object("function_call")) is not None:
        if tool_calls:
            raise invalid(message.field_path("function_call"), "must not be beside tool_calls")
        # Such a call has no id.
        tool_calls = (_called(function, f"call_{message_index}"),)
    # Both names are in use.
    reasoning = message.string("reasoning_content")
    if reasoning is None:
        reasoning = message.string("reasoning")
    is_answer = role == "assistant"
    content = _content(message, is_answer)
    if content is None and not (is_answer or tool_calls or reasoning is not None):
        raise invalid(message.field_path("content"), "must be given")
    return ChatMessage(
        role=role,
        content=content,
        tool_calls=tool_calls,
        tool_call_id=message.string("tool_call_id"),
        name=message.string("name"),
        reasoning=reasoning,
        path=message.path,
    )


def _content(message: JsonFields, is_answer: bool) -> str | None:
    content = message.raw("content")
    if content is None or isinstance(content, str):
        return content
    parts = message.objects("content")
    if not parts and is_answer:
        return None  # an answer may be empty
    if not parts:
        raise invalid(message.field_path("content"), "must have at least one part")
    # Templates take one text: parts are joined by line breaks, as in vLLM.
    return "\n".join(map(_text_part, parts))


def _text_part(part: JsonFields) -> str:
    kind = part.string("type")
    if kind != "text":
        raise QuireError(Reason.FEATURE_UNSUPPORTED, "only text is served", field=part.field_path("type"))
    return _given(part, "text")


def _tool_call(call: JsonFields) -> ToolCall:
    return _called(_function(call), call.string("id") or "")


def _called(function: JsonFields, call_id: str) -> ToolCall:
    return ToolCall(_given(function, "name"), function.string("arguments") or "", call_id, function.path)


def _tool(tool: JsonFields) -> ClientTool:
    return _defined(_function(tool))


def _functions(fields: JsonFields) -> tuple[ClientTool, ...]:
    return tuple(map(_defined, fields.objects("functions") or ()))


def _defined(function: JsonFields) -> ClientTool:
    return ClientTool(
        name=_given(function, "name"),
        description=function.string("description"),
        parameters=_json_text(function.field_path("parameters"), function.raw("parameters")),
        is_strict=function.flag("strict"),
        path=function.path,
    )


def _function(outer: JsonFields) -> JsonFields:
    """The function of a tool, or of a call of one."""
    kind = outer.string("type")
    if kind not in (None, "function"):
        raise QuireError(Reason.FEATURE_UNSUPPORTED, "only function is served", field=outer.field_path("type"))
    function = outer.object("function")
    if function is None:
        raise invalid(outer.field_path("function"), "must be given")
    return function


def _tool_choice(fields: JsonFields) -> ToolChoice | None:
    choice = fields.raw("tool_choice")
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise invalid("tool_choice", "must be auto, none, required, or an object that names a function")
        return _CHOICES[choice]
    named = JsonFields(as_object("tool_choice", choice), "tool_choice.")
    return ToolChoice(ToolMode.NAMED, _given(_function(named), "name"))


def _legacy_choice(fields: JsonFields) -> ToolChoice:
    choice = fields.raw("function_call")
    if isinstance(choice, str):
        if choice not in ("auto", "none"):
            raise invalid("function_call", "must be auto, none, or an object that names a function")
        return _CHOICES[choice]
    return ToolChoice(ToolMode.NAMED, _given(JsonFields(as_object("function_call", choice), "function_call."), "name"))


def _given(fields: JsonFields, name: str) -> str:
    text = fields.string(name)
    if text is None:
        raise invalid(fields.field_path(name), "must be given")
    return text


def _json_text(where: str, value: Any) -> str | None:
    """A JSON object as text."""
    if value is None:
        return None
    try:
        return json.dumps(as_object(where, value), ensure_ascii=False)
    except RecursionError:
        raise invalid(where, "has too many levels") from None
