"""The fields of /v1/chat/completions that make the prompt: messages, tools, and variables of the template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway_svc.chat_validation import check_variables_length
from gateway_svc.chats import (
    ChatMessage,
    ChatPrompt,
    ClientTool,
    CustomInput,
    PromptEnd,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_paths import Field
from gateway_svc.http_api.body_names import BODY_NAMES
from gateway_svc.http_api.json_body import invalid, json_text
from gateway_svc.http_api.openai.chat_models import (
    AllowedToolsChoice,
    CalledFunction,
    ChatOptions,
    CustomToolBody,
    CustomToolFields,
    FunctionBody,
    MessageBody,
    MessageCustomCall,
    MessageToolCall,
    NamedCustomTool,
    NamedFunction,
    NamedTool,
    ToolBody,
    ToolGrammar,
)
from gateway_svc.http_api.openai.choice_formats import TOOL_CALLS, CallFormat

NAMES: Mapping[str, str] = {
    **BODY_NAMES,
    Field.TEMPLATE_VARIABLES: "chat_template_kwargs",
    Field.MAX_REASONING_TOKENS: "thinking_token_budget",
    Field.PROMPT_END: "continue_final_message",
}

# Before OpenAI's API had tools.
_LEGACY_NAMES: Mapping[str, str] = {Field.TOOLS: "functions", Field.TOOL_CHOICE: "function_call"}

_NO_LIMIT = -1  # as vLLM writes it

_NO_EFFORT = "none"
_DEFAULT_EFFORT = "medium"  # of a model that is to reason

_CHOICES = {mode.value: ToolChoice(mode) for mode in ToolMode if mode is not ToolMode.NAMED}


@dataclass(frozen=True, slots=True)
class ChatFields:
    """The chat of a body; None where it has no messages. `names` has fields that this body spells in its own way."""

    prompt: ChatPrompt | None
    names: Mapping[str, str]
    calls: CallFormat = TOOL_CALLS
    """How the answer has calls."""

    @property
    def last_answer(self) -> str:
        """The text of the last message, if that is one of the assistant; else empty."""
        last = self.prompt.messages[-1] if self.prompt is not None and self.prompt.messages else None
        return (last.content or "") if last is not None and last.role == "assistant" else ""


def read_chat(body: ChatOptions, messages: Sequence[MessageBody] | None) -> ChatFields:
    """The chat of a body. Raises QuireError."""
    (chat,) = read_chats(body, {"messages": messages})
    return chat


def read_chats(body: ChatOptions, chats: Mapping[str, Sequence[MessageBody] | None]) -> list[ChatFields]:
    """The chats of a body, whose messages are by their paths. The other fields of the body are read once, and shared:
    there may be a thousand chats. Raises QuireError."""
    if body.tools is not None and body.functions is not None:
        raise invalid("functions", "must not be beside tools")
    if body.tool_choice is not None and body.function_call is not None:
        raise invalid("function_call", "must not be beside tool_choice")
    is_legacy = body.functions is not None
    variables, variable_names = _variables(body)
    reasoning = _reasoning(body)
    prompt = ChatPrompt(
        messages=(),
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        # A message has one function_call.
        parallel_tool_calls=False if is_legacy else body.parallel_tool_calls,
        template_variables=variables,
        reasoning_effort=reasoning.effort,
        prompt_end=prompt_end(body.add_generation_prompt is not False, body.continue_final_message),
        max_reasoning_tokens=reasoning.max_tokens,
        add_special_tokens=bool(body.add_special_tokens),
    )
    names = {Field.TOOLS: is_legacy, Field.TOOL_CHOICE: body.function_call is not None}
    is_named = prompt.tool_choice is not None and prompt.tool_choice.mode is ToolMode.NAMED
    fields = ChatFields(
        None,
        {
            **{which: _LEGACY_NAMES[which] for which, is_old in names.items() if is_old},
            **variable_names,
            **reasoning.names,
        },
        CallFormat(is_legacy, is_named),
    )
    return [
        fields if messages is None else replace(fields, prompt=replace(prompt, messages=read_messages(messages, path)))
        for path, messages in chats.items()
    ]


@dataclass(frozen=True, slots=True)
class _ReasoningLimits:
    """How much the model reasons. `names` has fields as this body spells them."""

    effort: str | None
    max_tokens: int | None
    names: Mapping[str, str]


def _reasoning(body: ChatOptions) -> _ReasoningLimits:
    effort, thinking = body.reasoning_effort, body.thinking
    max_tokens = None if body.thinking_token_budget == _NO_LIMIT else body.thinking_token_budget
    if thinking is None:
        return _ReasoningLimits(effort, max_tokens, {})
    names: dict[str, str] = {}
    is_off = thinking.type == "disabled"
    if effort is None:
        effort = _NO_EFFORT if is_off else _DEFAULT_EFFORT
        names[Field.REASONING_EFFORT] = "thinking.type"
    elif is_off is not (effort == _NO_EFFORT):
        raise invalid("thinking.type", "contradicts reasoning_effort")
    if thinking.budget_tokens is not None:
        if body.thinking_token_budget is not None:
            raise invalid("thinking.budget_tokens", "must not be beside thinking_token_budget")
        max_tokens = thinking.budget_tokens
        names[Field.MAX_REASONING_TOKENS] = "thinking.budget_tokens"
    return _ReasoningLimits(effort, max_tokens, names)


def prompt_end(has_generation_prompt: bool, continues_message: bool | None) -> PromptEnd:
    """How the prompt of a chat ends, from add_generation_prompt and continue_final_message. Raises QuireError."""
    if not continues_message:
        return PromptEnd.ANSWER if has_generation_prompt else PromptEnd.MESSAGE
    if has_generation_prompt:
        raise invalid("continue_final_message", "needs add_generation_prompt to be false")
    return PromptEnd.CONTINUATION


def read_messages(messages: Sequence[MessageBody], path: str) -> list[ChatMessage]:
    """The messages of a body, which are at `path`. Raises QuireError."""
    read: list[ChatMessage] = []
    latest_calls: dict[str | None, str] = {}  # ids, by function
    for message in messages:
        one = _message(message, len(read), f"{path}[{len(read)}]")
        if one.role == "function":  # the result of the latest call of this function
            one = ChatMessage("tool", one.content, (), latest_calls.get(one.name), one.name, path=one.path)
        # Of several calls of a function in one message the first one counts.
        latest_calls |= {call.name: call.id for call in reversed(one.tool_calls)}
        read.append(one)
    return read


def _message(message: MessageBody, message_index: int, path: str) -> ChatMessage:
    tool_calls = tuple(
        _tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())
    )
    if message.function_call is not None:
        if tool_calls:
            raise invalid(f"{path}.function_call", "must not be beside tool_calls")
        # Such a call has no id.
        tool_calls = (_called(message.function_call, f"call_{message_index}", f"{path}.function_call"),)
    # Both names are in use.
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    is_answer = message.role == "assistant"
    content = _content(message, path, is_answer)
    if content is None and not (is_answer or tool_calls or reasoning is not None):
        raise invalid(f"{path}.content", "must be given")
    return ChatMessage(
        role=message.role,
        content=content,
        tool_calls=tool_calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=reasoning,
        path=path,
        names={} if message.reasoning_content is None else {"reasoning": "reasoning_content"},
    )


def _content(message: MessageBody, path: str, is_answer: bool) -> str | None:
    content = message.content
    if content is None or isinstance(content, str):
        return content
    if not content and is_answer:
        return None  # an answer may be empty
    if not content:
        raise invalid(f"{path}.content", "must have at least one part")
    # Templates take one text: parts are joined by line breaks, as in vLLM.
    return "\n".join([part.text for part in content])


FUNCTION_NAMES = {"name": "function.name", "arguments": "function.arguments"}
"""Fields of a call that has them in a function, by their names in the contract."""


def _tool_call(call: MessageToolCall | MessageCustomCall, path: str) -> ToolCall:
    if isinstance(call, MessageCustomCall):
        names = {"name": "custom.name", "input": "custom.input"}
        return ToolCall(call.custom.name, id=call.id or "", path=path, input=call.custom.input, names=names)
    return replace(_called(call.function, call.id or "", path), names=FUNCTION_NAMES)


def _called(function: CalledFunction, call_id: str, path: str) -> ToolCall:
    return ToolCall(function.name, function.arguments or "", call_id, path)


def _variables(body: ChatOptions) -> tuple[str | None, Mapping[str, str]]:
    """The text of the variables for the template, and how this body calls the field, if in its own way."""
    variables = body.chat_template_kwargs
    if not body.documents:
        return template_variables(variables), {}
    if variables:
        if "documents" in variables:
            raise invalid("documents", "must not be beside documents in chat_template_kwargs")
        return template_variables({**variables, "documents": body.documents}), {}
    text = json_text("documents", {"documents": body.documents})
    check_variables_length("documents", text)
    return text, {Field.TEMPLATE_VARIABLES: "documents"}


def template_variables(variables: Mapping[str, Any] | None) -> str | None:
    """The text of chat_template_kwargs, if they are given. Raises QuireError, also where it is too long."""
    name = NAMES[Field.TEMPLATE_VARIABLES]
    text = optional_json(name, variables)
    if text is not None:
        check_variables_length(name, text)
    return text


def _tools(body: ChatOptions) -> tuple[ClientTool, ...]:
    if body.functions is not None:
        return tuple(client_tool(one, f"functions[{index}]") for index, one in enumerate(body.functions))
    return tuple(_tool(one, f"tools[{index}]") for index, one in enumerate(body.tools or ()))


def _tool(tool: ToolBody | CustomToolBody, path: str) -> ClientTool:
    if isinstance(tool, CustomToolBody):
        return _custom_tool(tool.custom, f"{path}.custom")
    return client_tool(tool.function, f"{path}.function")


def _custom_tool(tool: CustomToolFields, path: str) -> ClientTool:
    form = tool.format
    if form is not None and form.type == "grammar" and form.grammar is None:
        raise invalid(f"{path}.format.grammar", "must be given")
    grammar = None if form is None or form.type == "text" else form.grammar
    return ClientTool(tool.name, tool.description, custom=custom_input(grammar, f"{path}.format.grammar"), path=path)


def custom_input(grammar: ToolGrammar | None, path: str) -> CustomInput:
    """What a custom tool takes: with a grammar, which is at `path`, a text that matches it, else any text."""
    if grammar is None:
        return CustomInput()
    field = Field.REGEX if grammar.syntax == "regex" else Field.GRAMMAR
    return CustomInput(UnvalidatedConstraint(field, grammar.definition), f"{path}.definition")


def client_tool(function: FunctionBody, path: str) -> ClientTool:
    """A function that a body defines at `path`. Raises QuireError."""
    return ClientTool(
        name=function.name,
        description=function.description,
        parameters=optional_json(f"{path}.parameters", function.parameters),
        is_strict=bool(function.strict),
        path=path,
    )


def _tool_choice(body: ChatOptions) -> ToolChoice | None:
    choice = body.tool_choice if body.function_call is None else body.function_call
    match choice:
        case None:
            return None
        case NamedFunction():
            return ToolChoice(ToolMode.NAMED, choice.name)
        case NamedTool() | NamedCustomTool():
            return ToolChoice(ToolMode.NAMED, _name(choice))
        case AllowedToolsChoice():
            allowed = choice.allowed_tools
            names = map(_name, allowed.tools)
            return ToolChoice.among(ToolMode(allowed.mode), names, "tool_choice.allowed_tools.tools")
    return _CHOICES[choice]


def _name(tool: NamedTool | NamedCustomTool) -> str:
    return tool.custom.name if isinstance(tool, NamedCustomTool) else tool.function.name


def optional_json(where: str, value: Mapping[str, Any] | None) -> str | None:
    """The text of an object, which is at `where`, if there is one. Raises QuireError."""
    return None if value is None else json_text(where, value)
