"""Chats as clients send them in either protocol: typed values, not validated. JSON stays text until it is checked, off
the event loop."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_paths import Field
from gateway_svc.unknown_fields import reject_unknown_fields
from gateway_svc.work_costs import CHAT_ITEM, LONG
from quire.inference.v1 import inference_pb2
from svc_common.errors import QuireError, Reason

MAX_TOOLS = 128
MAX_CALLS = 128  # of a message


def field_place(path: str, names: Mapping[str, str], name: str) -> str:
    """Where errors find a field of a value at `path`, as the caller wrote it. `names` are those of the caller's
    protocol, by those of the contract; an empty one is the value itself."""
    own = names.get(name, name)
    return f"{path}.{own}" if own else path


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an assistant's message. `arguments` is a JSON object as text; a call of a custom tool has `input`
    instead, the text that the tool takes. `path` is where errors find the call, with `names` of its fields that are
    not those of the contract."""

    name: str
    arguments: str = ""
    id: str = ""
    path: str = field(default="", compare=False)
    input: str | None = None
    names: Mapping[str, str] = field(default_factory=dict, compare=False)

    def place(self, name: str) -> str:
        """Where errors find a field."""
        return field_place(self.path, self.names, name)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `tool_call_id` is the call whose result it has. `path` is where errors find the message, with
    `names` of its fields that are not those of the contract."""

    role: str
    content: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    path: str = field(default="", compare=False)
    names: Mapping[str, str] = field(default_factory=dict, compare=False)

    def place(self, name: str) -> str:
        """Where errors find a field."""
        return field_place(self.path, self.names, name)


@dataclass(frozen=True, slots=True)
class CustomInput:
    """What a custom tool takes. `constraint` is what the text matches; None: it is any text. `path` is where errors
    find the constraint."""

    constraint: UnvalidatedConstraint | None = None
    path: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool that the model may call: a function, or with `custom` a tool that takes a text. `parameters` is a JSON
    schema as text, None for a function without any. `path` is where errors find the tool, with `names` of its fields
    that are not those of the contract."""

    name: str
    description: str | None = None
    parameters: str | None = None
    is_strict: bool = False
    custom: CustomInput | None = None
    path: str = field(default="", compare=False)
    names: Mapping[str, str] = field(default_factory=dict, compare=False)

    def place(self, name: str) -> str:
        """Where errors find a field."""
        return field_place(self.path, self.names, name)

    @property
    def is_constrained(self) -> bool:
        """Whether its calls match its schema or its grammar also where the model decides whether to call it."""
        return self.is_strict or (self.custom is not None and self.custom.constraint is not None)

    @property
    def length(self) -> int:
        """Characters of all that describes it."""
        grammars = () if self.custom is None or self.custom.constraint is None else self.custom.constraint.texts
        return sum(map(len, (self.name, self.description or "", self.parameters or "", *grammars)))


class ToolMode(StrEnum):
    """Whether the model calls tools."""

    AUTO = "auto"
    """As it decides."""
    NONE = "none"
    """Never; tools are left out of the prompt."""
    REQUIRED = "required"
    """At least once."""
    NAMED = "named"
    """One tool, which is named."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` is set with the mode NAMED. With another one, `allowed` are the names of the tools that may be called;
    empty: all of them."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None
    allowed: tuple[str, ...] = ()

    @classmethod
    def among(cls, mode: ToolMode, names: Iterable[str], path: str) -> "ToolChoice":
        """The choice among the tools that a client lists at `path`. Raises QuireError."""
        choice = cls(mode, allowed=tuple(names))
        if not choice.allowed:
            raise QuireError(Reason.INVALID_FIELD, "must hold at least one tool", field=path)
        return choice

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls, and no text."""
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)

    def allows(self, name: str) -> bool:
        """Whether a tool may be called."""
        return name == self.name if self.name is not None else not self.allowed or name in self.allowed


class PromptEnd(StrEnum):
    """Where a chat's prompt ends."""

    ANSWER = "answer"
    """Where the answer of the assistant begins, after the generation prompt."""
    MESSAGE = "message"
    """After the last message."""
    CONTINUATION = "continuation"
    """Within the last message, at the end of its content, so that the output continues it."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat to continue, oldest message first. `template_variables` is a JSON object as text: variables for the
    template."""

    messages: Sequence[ChatMessage]
    tools: Sequence[ClientTool] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    template_variables: str | None = None
    reasoning_effort: str | None = None
    prompt_end: PromptEnd = PromptEnd.ANSWER
    max_reasoning_tokens: int | None = None
    must_limit_reasoning: bool = True
    """Whether that is refused, not ignored, for a model whose reasoning cannot be limited."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens to those that the template writes."""

    @property
    def has_tools(self) -> bool:
        """Whether the model may call tools."""
        return bool(self.tools) and (self.tool_choice is None or self.tool_choice.mode is not ToolMode.NONE)

    @property
    def has_json(self) -> bool:
        """Whether there is JSON to parse."""
        return bool(self.tools or self.template_variables or any(message.tool_calls for message in self.messages))

    @classmethod
    def from_proto(cls, chat: inference_pb2.Chat, path: str) -> "ChatPrompt":
        """From the public contract; `path` is that of the chat. Raises QuireError for a field that this version of the
        contract does not have, and for more tools or calls than a chat may have: in the contract one of them takes two
        bytes."""
        reject_unknown_fields(chat, path)
        check_num_tools(len(chat.tools), f"{path}.tools")
        return cls(
            messages=[_message(one, f"{path}.messages[{index}]") for index, one in enumerate(chat.messages)],
            tools=tuple(_tool(one, f"{path}.tools[{index}]") for index, one in enumerate(chat.tools)),
            tool_choice=_tool_choice(chat, path),
            parallel_tool_calls=chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None,
            template_variables=chat.template_kwargs or None,
            reasoning_effort=chat.reasoning_effort or None,
            prompt_end=_prompt_end(chat, path),
            max_reasoning_tokens=chat.max_reasoning_tokens if chat.HasField("max_reasoning_tokens") else None,
        )


def conversion_cost(chat: inference_pb2.Chat) -> float:
    """Of `ChatPrompt.from_proto`, in microseconds. Calls are counted only where it is not long without them."""
    count = len(chat.messages) + len(chat.tools) + len(chat.allowed_tools.names)
    if CHAT_ITEM * count > LONG:
        return CHAT_ITEM * count
    return CHAT_ITEM * (count + sum(len(message.tool_calls) for message in chat.messages))


def check_num_tools(count: int, where: str) -> None:
    """Rejects more tools, which are at `where`, than a chat may have. Raises QuireError."""
    if count > MAX_TOOLS:
        raise QuireError(Reason.INVALID_FIELD, f"must hold at most {MAX_TOOLS} tools", field=where)


def check_num_calls(count: int, where: str) -> None:
    """Rejects more calls, which are at `where`, than a message may have. Raises QuireError."""
    if count > MAX_CALLS:
        raise QuireError(Reason.INVALID_FIELD, f"must hold at most {MAX_CALLS} calls", field=where)


def _message(message: inference_pb2.ChatMessage, path: str) -> ChatMessage:
    reject_unknown_fields(message, path)
    check_num_calls(len(message.tool_calls), f"{path}.tool_calls")
    return ChatMessage(
        role=message.role,
        content=message.content or (None if message.tool_calls else ""),
        tool_calls=tuple(
            _tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ),
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
        name=message.name if message.HasField("name") else None,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
        path=path,
    )


def _tool_call(call: inference_pb2.ToolCall, path: str) -> ToolCall:
    reject_unknown_fields(call, path)
    return ToolCall(call.name, call.arguments, call.id, path, call.input if call.HasField("input") else None)


def _tool(tool: inference_pb2.Tool, path: str) -> ClientTool:
    reject_unknown_fields(tool, path)
    custom = _custom_input(tool.custom, f"{path}.custom") if tool.HasField("custom") else None
    return ClientTool(tool.name, tool.description or None, tool.parameters or None, tool.strict, custom, path)


def _custom_input(custom: inference_pb2.CustomInput, path: str) -> CustomInput:
    reject_unknown_fields(custom, path)
    match custom.WhichOneof("format"):
        case "grammar":
            return CustomInput(UnvalidatedConstraint(Field.GRAMMAR, custom.grammar), f"{path}.grammar")
        case "regex":
            return CustomInput(UnvalidatedConstraint(Field.REGEX, custom.regex), f"{path}.regex")
    return CustomInput()


_TOOL_MODES = {
    inference_pb2.TOOL_MODE_UNSPECIFIED: None,
    inference_pb2.TOOL_MODE_AUTO: ToolChoice(ToolMode.AUTO),
    inference_pb2.TOOL_MODE_NONE: ToolChoice(ToolMode.NONE),
    inference_pb2.TOOL_MODE_REQUIRED: ToolChoice(ToolMode.REQUIRED),
}

_ALLOWED_TOOLS_MODES = {
    inference_pb2.TOOL_MODE_UNSPECIFIED: ToolMode.AUTO,
    inference_pb2.TOOL_MODE_AUTO: ToolMode.AUTO,
    inference_pb2.TOOL_MODE_REQUIRED: ToolMode.REQUIRED,
}

_PROMPT_ENDS = {
    inference_pb2.PROMPT_END_UNSPECIFIED: PromptEnd.ANSWER,
    inference_pb2.PROMPT_END_ANSWER: PromptEnd.ANSWER,
    inference_pb2.PROMPT_END_MESSAGE: PromptEnd.MESSAGE,
    inference_pb2.PROMPT_END_CONTINUATION: PromptEnd.CONTINUATION,
}


def _tool_choice(chat: inference_pb2.Chat, path: str) -> ToolChoice | None:
    match chat.WhichOneof("tool_choice"):
        case "tool_name":
            return ToolChoice(ToolMode.NAMED, chat.tool_name)
        case "allowed_tools":
            return _allowed_tools(chat.allowed_tools, f"{path}.allowed_tools")
    if chat.tool_mode not in _TOOL_MODES:
        raise QuireError(Reason.INVALID_FIELD, "is not one of the values of ToolMode", field=f"{path}.tool_mode")
    return _TOOL_MODES[chat.tool_mode]


def _allowed_tools(allowed: inference_pb2.AllowedTools, path: str) -> ToolChoice:
    reject_unknown_fields(allowed, path)
    if allowed.mode not in _ALLOWED_TOOLS_MODES:
        message = "must be TOOL_MODE_AUTO or TOOL_MODE_REQUIRED"
        raise QuireError(Reason.INVALID_FIELD, message, field=f"{path}.mode")
    return ToolChoice.among(_ALLOWED_TOOLS_MODES[allowed.mode], allowed.names, f"{path}.names")


def _prompt_end(chat: inference_pb2.Chat, path: str) -> PromptEnd:
    if chat.prompt_end not in _PROMPT_ENDS:
        raise QuireError(Reason.INVALID_FIELD, "is not one of the values of PromptEnd", field=f"{path}.prompt_end")
    return _PROMPT_ENDS[chat.prompt_end]
