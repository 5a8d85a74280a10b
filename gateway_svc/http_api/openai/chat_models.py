"""The body of /v1/chat/completions: messages, tools, and what else makes the prompt."""

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from gateway_svc.http_api.body_model import (
    BodyModel,
    ErrorMessage,
    Items,
    JsonObject,
    Neutral,
    not_served,
    option,
    tag,
    type_of,
)
from gateway_svc.http_api.openai import unsupported_fields
from gateway_svc.http_api.openai.generation_body import GenerationBody


def _only_text(kind: str | None) -> str | None:
    if kind != "text":
        raise not_served("only text is served")
    return kind


def _only_function(kind: str | None) -> str | None:
    if kind not in (None, "function"):
        raise not_served("only function and custom are served")
    return kind


_Function = Annotated[str | None, AfterValidator(_only_function)]


def _only_choices(kind: str | None) -> str | None:
    if kind not in (None, "function"):
        raise not_served("only function, custom and allowed_tools are served")
    return kind


def _kind_of_tool(value: Any, others: Collection[str] = ("custom",)) -> str:
    kind = type_of(value)
    return tag(kind if isinstance(kind, str) and kind in others else "function")


class TextPart(BodyModel):
    """A part of a message's content."""

    type: Annotated[str | None, AfterValidator(_only_text)] = Field(
        None, description="Only text is served.", validate_default=True, json_schema_extra={"enum": ["text"]}
    )
    text: str = Field(description="The text.")


class CalledFunction(BodyModel):
    """A call of a function."""

    name: str = Field(description="The function.")
    arguments: str | None = option("A JSON object as text.")


class MessageToolCall(BodyModel):
    """A call of a function in a message of the assistant."""

    id: str | None = option("The call's id, to which a message with its result refers.")
    type: _Function = option("function.", "function")
    function: CalledFunction = Field(description="The call.")


class CalledCustomTool(BodyModel):
    """A call of a custom tool."""

    name: str = Field(description="The tool.")
    input: str = Field(description="The text that it takes.")


class MessageCustomCall(BodyModel):
    """A call of a custom tool in a message of the assistant."""

    id: str | None = option("The call's id, to which a message with its result refers.")
    type: Literal["custom"] = Field(description="custom.")
    custom: CalledCustomTool = Field(description="The call.")


AnyMessageCall = Annotated[
    Annotated[MessageToolCall, Tag(tag("function"))] | Annotated[MessageCustomCall, Tag(tag("custom"))],
    Discriminator(_kind_of_tool),
]


def _kind_of_content(value: Any) -> str:
    return tag("text") if isinstance(value, str) else tag("parts")


class MessageBody(BodyModel):
    """A message of a chat."""

    unserved: ClassVar[Neutral] = unsupported_fields.MESSAGE

    role: str = Field(description="system, developer, user, assistant, tool, or a role of the model's template.")
    tool_calls: Items[AnyMessageCall] | None = option("Calls that the assistant made.")
    function_call: CalledFunction | None = option("The one call of the assistant, in the legacy form.")
    reasoning_content: str | None = option("The assistant's reasoning.")
    reasoning: str | None = option("Another name of reasoning_content.")
    content: (
        Annotated[
            Annotated[str, Tag(tag("text"))] | Annotated[Items[TextPart], Tag(tag("parts"))],
            Discriminator(_kind_of_content),
        ]
        | None
    ) = option("The text, or its parts. An assistant's message may be without.")
    tool_call_id: str | None = option("The call whose result this is, in a message of the role tool.")
    name: str | None = option("The author's name.", maxLength=256)


class FunctionBody(BodyModel):
    """A function that the model may call."""

    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = option("What it does.")
    parameters: JsonObject | None = option("A JSON Schema of its arguments.")
    strict: bool | None = option("Whether arguments are always valid for the schema.", False)


class ToolBody(BodyModel):
    """A function that the model may call."""

    type: _Function = option("function.", "function")
    function: FunctionBody = Field(description="The function.")


class ToolGrammar(BodyModel):
    """A grammar, and the syntax in which it is written."""

    syntax: Annotated[Literal["lark", "regex"], ErrorMessage('must be "lark" or "regex"')] = Field(
        description="lark or regex."
    )
    definition: str = Field(description="A grammar in Lark's syntax, or a regular expression.")


class InputFormat(BodyModel):
    """What the text that a custom tool takes must match."""

    type: Annotated[Literal["text", "grammar"], ErrorMessage('must be "text" or "grammar"')] = Field(
        description="text, which is any, or grammar."
    )
    grammar: ToolGrammar | None = option("The grammar of the type grammar.")


class CustomToolFields(BodyModel):
    """A tool that takes a text."""

    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = option("What it does.")
    format: InputFormat | None = option("What the text must match; absent: it is any text.")


class CustomToolBody(BodyModel):
    """A tool that the model may call and that takes a text."""

    type: Literal["custom"] = Field(description="custom.")
    custom: CustomToolFields = Field(description="The tool.")


AnyTool = Annotated[
    Annotated[ToolBody, Tag(tag("function"))] | Annotated[CustomToolBody, Tag(tag("custom"))],
    Discriminator(_kind_of_tool),
]


class NamedFunction(BodyModel):
    """A tool by its name."""

    name: str = Field(description="The tool.")


class NamedTool(BodyModel):
    """A function by its name."""

    type: Annotated[str | None, AfterValidator(_only_choices)] = option("function.", "function")
    function: NamedFunction = Field(description="The function.")


class NamedCustomTool(BodyModel):
    """A custom tool by its name."""

    type: Literal["custom"] = Field(description="custom.")
    custom: NamedFunction = Field(description="The tool.")


class AllowedTools(BodyModel):
    """Tools of which alone the model may call some."""

    mode: Annotated[Literal["auto", "required"], ErrorMessage("must be auto or required")] = Field(
        description="Whether the model decides whether it calls one, or must."
    )
    tools: Items[
        Annotated[
            Annotated[NamedTool, Tag(tag("function"))] | Annotated[NamedCustomTool, Tag(tag("custom"))],
            Discriminator(_kind_of_tool),
        ]
    ] = Field(description="The tools, each by its name.", json_schema_extra={"minItems": 1, "maxItems": 128})


class AllowedToolsChoice(BodyModel):
    """The choice among some of the tools."""

    type: Literal["allowed_tools"] = Field(description="allowed_tools.")
    allowed_tools: AllowedTools = Field(description="The tools that may be called.")


def _kind_of_choice(value: Any) -> str:
    return tag("mode") if isinstance(value, str) else _kind_of_tool(value, ("custom", "allowed_tools"))


def _mode_or_name(value: Any) -> str:
    return tag("mode") if isinstance(value, str) else tag("name")


_ToolMode = Annotated[
    Literal["auto", "none", "required"],
    ErrorMessage("must be auto, none, required, or an object that names tools"),
    Tag(tag("mode")),
]
_ToolChoice = Annotated[
    _ToolMode
    | Annotated[NamedTool, Tag(tag("function"))]
    | Annotated[NamedCustomTool, Tag(tag("custom"))]
    | Annotated[AllowedToolsChoice, Tag(tag("allowed_tools"))],
    Discriminator(_kind_of_choice),
]
_FunctionMode = Annotated[
    Literal["auto", "none"], ErrorMessage("must be auto, none, or an object that names a function"), Tag(tag("mode"))
]


class ChatThinking(BodyModel):
    """Whether the model reasons, as DeepSeek's API has it."""

    type: Annotated[
        Literal["enabled", "adaptive", "disabled"], ErrorMessage("must be enabled, adaptive or disabled")
    ] = Field(description="enabled, adaptive or disabled.")
    budget_tokens: int | None = option("Another name of thinking_token_budget.", minimum=0, maximum=2**31 - 1)


class ChatOptions(GenerationBody):
    """What bodies of chats have beside messages."""

    unserved: ClassVar[Neutral] = unsupported_fields.CHAT

    logprobs: bool | None = option("Whether the answer has log-probabilities.", False)
    top_logprobs: int | None = option("The number of most probable tokens to return for each.", minimum=0)
    tools: Items[AnyTool] | None = option("Tools that the model may call.", maxItems=128)
    tool_choice: _ToolChoice | None = option("Whether the model calls tools, and which.", "auto")
    parallel_tool_calls: bool | None = option("Whether an answer may have several calls.", True)
    functions: Items[FunctionBody] | None = option("Functions, in the legacy form.", maxItems=128)
    function_call: (
        Annotated[_FunctionMode | Annotated[NamedFunction, Tag(tag("name"))], Discriminator(_mode_or_name)] | None
    ) = option("The choice among functions, in the legacy form.")
    chat_template_kwargs: JsonObject | None = option("Variables for the chat template, at most 262,144 characters.")
    documents: Items[JsonObject] | None = option(
        'Documents for a template that takes them, such as {"title": …, "text": …}: a variable of the template.'
    )
    echo: bool | None = option("Whether answers begin with the last message, if that is one of the assistant.", False)
    include_reasoning: bool | None = option("Whether the answer has the model's reasoning.", True)
    reasoning_effort: str | None = option(
        "How much the model reasons, if its template takes that.",
        examples=["none", "minimal", "low", "medium", "high", "xhigh"],
    )
    thinking: ChatThinking | None = option(
        "Another way to say reasoning_effort: none for disabled, else medium where it is not given."
    )
    thinking_token_budget: int | None = option(
        "The reasoning has at most this many tokens, and then it ends; -1: no limit.",
        -1,
        minimum=-1,
        maximum=2**31 - 1,
    )
    add_generation_prompt: bool | None = option("Whether the prompt ends where an answer begins.", True)
    add_special_tokens: bool | None = option(
        "Whether the tokenizer adds its special tokens to those that the template writes.", False
    )
    continue_final_message: bool | None = option(
        "Whether the answer continues the last message; needs add_generation_prompt to be false.", False
    )


class ChatBody(ChatOptions):
    """A body of /v1/chat/completions."""

    messages: Items[MessageBody] | None = option("The chat, oldest message first.", minItems=1)


class ChatBatchBody(ChatOptions):
    """A body of /v1/chat/completions/batch."""

    unserved: ClassVar[Neutral] = {
        **unsupported_fields.CHAT,
        "echo": (False,),
        "function_call": (),
        "functions": ([],),
        "prompt_logprobs": (),
        "stream": (False,),
        "stream_options": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
    }

    messages: Items[Items[MessageBody]] | None = option("Chats, each with its oldest message first.", minItems=1)
