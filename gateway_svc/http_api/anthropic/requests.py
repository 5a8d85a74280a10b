"""Bodies of /v1/messages as unvalidated requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from gateway_svc.chats import ChatMessage, ChatPrompt, ClientTool, PromptEnd, ToolCall, ToolChoice, ToolMode
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_paths import Field, NamedFields
from gateway_svc.http_api.anthropic.models import (
    AnthropicMessage,
    AnthropicTool,
    MessagesBody,
    OutputFormat,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from gateway_svc.http_api.body_names import BODY_NAMES
from gateway_svc.http_api.calls import PromptRequest
from gateway_svc.http_api.json_body import invalid, json_text
from gateway_svc.http_api.openai.chat_fields import template_variables
from gateway_svc.unvalidated_request import ResponseMode, UnvalidatedRequest

_NAMES: Mapping[str, str] = {
    **BODY_NAMES,
    Field.PROMPT: "messages",
    Field.PROMPT_END: "messages",
    Field.TEMPLATE_VARIABLES: "chat_template_kwargs",
    Field.STOP: "stop_sequences",
}

_EFFORTS = {"max": "xhigh"}
_BUDGET_FIELD = "thinking.budget_tokens"
# As LiteLLM maps efforts to budgets.
_LOW_BUDGET, _MEDIUM_BUDGET = 1_024, 2_048


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A body's prompt, and whether its answer is streamed."""

    prompt: PromptRequest
    is_streamed: bool


def read_messages(body: MessagesBody, request_id: str | None) -> MessagesRequest:
    """The request of a body of /v1/messages. Raises QuireError."""
    if body.max_tokens is None:
        raise invalid("max_tokens", "must be given")
    chat, names = _chat(body)
    constraint, where = _constraint(body)
    sampling = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    unvalidated = UnvalidatedRequest(
        prompt=chat,
        model=body.model,
        sampling={name: value for name, value in sampling.items() if value is not None},
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or [],
        constraint=constraint,
        request_id=request_id,
        cache_salt=body.cache_salt,
        response_mode=ResponseMode.STREAMED if body.stream else ResponseMode.WHOLE,
    )
    names = {**names, Field.JSON_SCHEMA: where}
    return MessagesRequest(PromptRequest(unvalidated, NamedFields(names)), bool(body.stream))


def read_count(body: MessagesBody, _: str | None) -> PromptRequest:
    """The prompt of a body of /v1/messages/count_tokens. Raises QuireError."""
    chat, names = _chat(body)
    return PromptRequest(UnvalidatedRequest(prompt=chat, model=body.model), NamedFields(names))


def _chat(body: MessagesBody) -> tuple[ChatPrompt, Mapping[str, str]]:
    """The chat, and the names of its fields."""
    if not body.messages:
        raise invalid("messages", "must not be empty" if body.messages is not None else "must be given")
    turns: list[list[ChatMessage]] = []
    if body.system is not None:
        turns.append([ChatMessage("system", _joined(body.system), path="system", names={"content": ""})])
    for index, message in enumerate(body.messages):
        for one in _READ[message.role](message, f"messages[{index}]"):
            # Consecutive messages of the user, or of the assistant, are one turn.
            if turns and turns[-1][0].role == one.role and one.role in ("user", "assistant"):
                turns[-1].append(one)
            else:
                turns.append([one])
    effort, where = _effort(body)
    choice = body.tool_choice
    chat = ChatPrompt(
        messages=[_combined(turn) for turn in turns],
        tools=tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        template_variables=template_variables(body.chat_template_kwargs),
        reasoning_effort=effort,
        max_reasoning_tokens=_budget(body),
        # Clients send a budget to any model.
        must_limit_reasoning=False,
        prompt_end=PromptEnd.CONTINUATION if body.messages[-1].role == "assistant" else PromptEnd.ANSWER,
    )
    return chat, {**_NAMES, Field.REASONING_EFFORT: where, Field.MAX_REASONING_TOKENS: _BUDGET_FIELD}


def _user(message: AnthropicMessage, path: str) -> list[ChatMessage]:
    """The results of calls and the texts of a message, in order: results are messages of their own."""
    if isinstance(message.content, str):
        return [ChatMessage("user", message.content, path=path)]
    if not message.content:
        raise invalid(f"{path}.content", "must have at least one block")
    read: list[ChatMessage] = []
    texts: list[str] = []
    for index, block in enumerate(message.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                if texts:
                    read.append(ChatMessage("user", "\n".join(texts), path=path))
                    texts = []
                result = "" if block.content is None else _joined(block.content)
                where = f"{path}.content[{index}]"
                read.append(
                    ChatMessage("tool", result, tool_call_id=block.tool_use_id, path=where, names=_RESULT_NAMES)
                )
            case _:
                raise invalid(f"{path}.content[{index}].type", "needs the role assistant")
    return [*read, ChatMessage("user", "\n".join(texts), path=path)] if texts else read


# Fields of chats, by their names in the contract. Reasoning is a block of the content.
_RESULT_NAMES = {"tool_call_id": "tool_use_id"}
_CALL_NAMES = {"arguments": "input"}
_ANSWER_NAMES = {"reasoning": "content", "tool_calls": "content"}
_TOOL_NAMES = {"parameters": "input_schema"}


def _assistant(message: AnthropicMessage, path: str) -> list[ChatMessage]:
    if isinstance(message.content, str):
        return [ChatMessage("assistant", message.content, path=path)]
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(message.content):
        where = f"{path}.content[{index}]"
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                arguments = json_text(f"{where}.input", block.input)
                calls.append(ToolCall(block.name, arguments, block.id, where, names=_CALL_NAMES))
            case _:
                raise invalid(f"{where}.type", "needs the role user")
    return [
        ChatMessage(
            "assistant",
            "\n".join(texts) if texts else None,
            tuple(calls),
            reasoning="\n".join(reasoning) if reasoning else None,
            path=path,
            names=_ANSWER_NAMES,
        )
    ]


def _system(message: AnthropicMessage, path: str) -> list[ChatMessage]:
    if isinstance(message.content, str):
        return [ChatMessage("system", message.content, path=path)]
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    for index, block in enumerate(message.content):
        if not isinstance(block, TextBlock):
            raise invalid(f"{path}.content[{index}].type", "must be text in a message of the role system")
    return [ChatMessage("system", "\n".join(texts), path=path)]


_READ: Mapping[str, Callable[[AnthropicMessage, str], list[ChatMessage]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system,
}


def _combined(turn: Sequence[ChatMessage]) -> ChatMessage:
    """The messages of a turn as one."""
    if len(turn) == 1:
        return turn[0]
    return replace(
        turn[0],
        content=_lines([one.content for one in turn]),
        tool_calls=tuple(chain.from_iterable(one.tool_calls for one in turn)),
        reasoning=_lines([one.reasoning for one in turn]),
    )


def _lines(texts: Sequence[str | None]) -> str | None:
    given = [text for text in texts if text is not None]
    return "\n".join(given) if given else None


def _joined(content: str | Sequence[TextBlock]) -> str:
    # Templates take one text: blocks are joined by line breaks, as the parts of OpenAI's messages.
    return content if isinstance(content, str) else "\n".join([block.text for block in content])


def _tool(tool: AnthropicTool, path: str) -> ClientTool:
    return ClientTool(
        name=tool.name,
        description=tool.description,
        parameters=json_text(f"{path}.input_schema", tool.input_schema),
        is_strict=bool(tool.strict),
        path=path,
        names=_TOOL_NAMES,
    )


def _tool_choice(body: MessagesBody) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    match choice.type:
        case "auto":
            return ToolChoice(ToolMode.AUTO)
        case "any":
            return ToolChoice(ToolMode.REQUIRED)
        case "none":
            return ToolChoice(ToolMode.NONE)
        case "tool":
            if choice.name is None:
                raise invalid("tool_choice.name", "must be given")
            return ToolChoice(ToolMode.NAMED, choice.name)


def _budget(body: MessagesBody) -> int | None:
    """The most tokens of the reasoning."""
    thinking = body.thinking
    return thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None


def _effort(body: MessagesBody) -> tuple[str | None, str]:
    """How much the model reasons, and the field that says so."""
    thinking, config = body.thinking, body.output_config
    if thinking is not None and thinking.type == "disabled":
        return "none", "thinking.type"
    if config is not None and config.effort is not None:
        return _EFFORTS.get(config.effort, config.effort), "output_config.effort"
    if thinking is None:
        return None, "thinking"
    where, budget = _BUDGET_FIELD, thinking.budget_tokens
    if thinking.type == "adaptive" or budget is None:
        return "medium", where
    if budget < 1:
        raise invalid(where, "must be at least 1")
    return "low" if budget <= _LOW_BUDGET else "medium" if budget <= _MEDIUM_BUDGET else "high", where


def _constraint(body: MessagesBody) -> tuple[UnvalidatedConstraint | None, str]:
    """What the answer must match, and the field that says so."""
    form: OutputFormat | None = None if body.output_config is None else body.output_config.format
    where = "output_config.format.schema"
    if body.output_format is not None:
        if form is not None:
            raise invalid("output_format", "must not be beside output_config.format")
        form, where = body.output_format, "output_format.schema"
    if form is None:
        return None, where
    return UnvalidatedConstraint(Field.JSON_SCHEMA, json_text(where, form.schema_)), where
