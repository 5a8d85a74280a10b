"""The body of Anthropic's /v1/messages."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from gateway_svc.http_api.body_model import (
    BodyModel,
    ErrorMessage,
    Items,
    JsonObject,
    Neutral,
    Notes,
    Number,
    not_served,
    option,
    tag,
)
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.http_api.openai.generation_body import CompletionBody


def _only_text(kind: str) -> str:
    if kind != "text":
        raise not_served("only text is served")
    return kind


def _refuse_block(kind: str) -> str:
    raise not_served("only text, tool_use, tool_result, thinking and redacted_thinking are served")


def _only_custom(kind: str | None) -> str | None:
    if kind not in (None, "custom"):
        raise not_served("only custom is served")
    return kind


_Text = Annotated[str, AfterValidator(_only_text)]
_CallId = Annotated[str, Field(min_length=1, max_length=256)]


class TextBlock(BodyModel):
    """A text."""

    type: _Text = Field(json_schema_extra={"enum": ["text"]})
    text: str


class ToolUseBlock(BodyModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: _CallId = Field(description="The call's id, to which the block with its result refers.")
    name: str = Field(description="The tool.")
    input: JsonObject = Field(description="The arguments.")


def _kind_of_content(value: Any) -> str:
    return tag("text") if isinstance(value, str) else tag("blocks")


Texts = Annotated[
    Annotated[str, Tag(tag("text"))] | Annotated[Items[TextBlock], Tag(tag("blocks"))],
    Discriminator(_kind_of_content),
]
"""A text, or blocks of text."""


class ToolResultBlock(BodyModel):
    """The result of a call, in a message of the user."""

    type: Literal["tool_result"]
    tool_use_id: _CallId = Field(description="The call.")
    content: Texts | None = option("The result. Templates have no place for whether it is an error: it says so.")
    is_error: bool | None = option("Whether the call failed. Without effect.", False)


class ThinkingBlock(BodyModel):
    """Reasoning of the assistant."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = option("Is not read: reasoning is not signed.")


class RedactedThinkingBlock(BodyModel):
    """Reasoning of another server, which cannot be read here. It is left out."""

    type: Literal["redacted_thinking"]
    data: str


class OtherBlock(BodyModel):
    """A block that is not served."""

    type: Annotated[str, AfterValidator(_refuse_block)]


_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _kind_of_block(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else "text"
    return tag(kind if kind in _KINDS else "other")


Block = Annotated[
    Annotated[TextBlock, Tag(tag("text"))]
    | Annotated[ToolUseBlock, Tag(tag("tool_use"))]
    | Annotated[ToolResultBlock, Tag(tag("tool_result"))]
    | Annotated[ThinkingBlock, Tag(tag("thinking"))]
    | Annotated[RedactedThinkingBlock, Tag(tag("redacted_thinking"))]
    | Annotated[OtherBlock, Tag(tag("other"))],
    Discriminator(_kind_of_block),
]


class AnthropicMessage(BodyModel):
    """A message of a chat."""

    role: Annotated[Literal["user", "assistant", "system"], ErrorMessage("must be user, assistant or system")]
    content: Annotated[
        Annotated[str, Tag(tag("text"))] | Annotated[Items[Block], Tag(tag("blocks"))],
        Discriminator(_kind_of_content),
    ]


class AnthropicTool(BodyModel):
    """A tool that the model may call."""

    type: Annotated[str | None, AfterValidator(_only_custom)] = option("Only custom is served.", "custom")
    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = option("What it does.")
    input_schema: JsonObject = Field(description="A JSON Schema of its arguments.")
    strict: bool | None = option("Whether arguments are always valid for the schema.", False)


class ToolChoiceBody(BodyModel):
    """Whether the model calls tools."""

    type: Annotated[Literal["auto", "any", "tool", "none"], ErrorMessage("must be auto, any, tool or none")]
    name: str | None = option("The tool, with the type tool.")
    disable_parallel_tool_use: bool | None = option("Whether an answer may have one call only.", False)


class Thinking(BodyModel):
    """Whether the model reasons, if its template takes that."""

    unserved: ClassVar[Neutral] = {"display": ("summarized",)}

    type: Annotated[Literal["enabled", "adaptive", "disabled"], ErrorMessage("must be enabled, adaptive or disabled")]
    budget_tokens: int | None = option(
        "The most tokens of the reasoning; it also chooses the effort.", minimum=1, maximum=2**31 - 1
    )


class OutputFormat(BodyModel):
    """What the answer must match."""

    type: Annotated[Literal["json_schema"], ErrorMessage("must be json_schema")]
    schema_: JsonObject = Field(alias="schema", description="A JSON Schema.")


class OutputConfig(BodyModel):
    """About the output."""

    effort: (
        Annotated[Literal["low", "medium", "high", "xhigh", "max"], ErrorMessage("is not a known effort")] | None
    ) = option("How much the model reasons, if its template takes that.")
    format: OutputFormat | None = option("What the answer must match.")


class MessagesBody(BodyModel):
    """A body of /v1/messages and of /v1/messages/count_tokens."""

    elsewhere: ClassVar = (ChatBody, CompletionBody)
    unserved: ClassVar[Neutral] = {
        "compaction": (),
        "diagnostics": ({}, {"previous_message_id": None}),
        "fallbacks": ([],),
        "speed": ("standard",),
        "thread": (),
    }
    without_effect: ClassVar[Notes] = {
        "billing_policy": "How to bill.",
        "cache_control": "The prefix cache finds the longest common prefix itself.",
        "fallback_credit_token": "How to bill.",
        "metadata": "The client's notes.",
        "service_tier": "How to bill.",
    }

    model: str | None = option("Name or alias of the model; absent: the first model.")
    messages: Items[AnthropicMessage] | None = option(
        "The chat, oldest message first. Consecutive messages of a role are one. An answer continues a last message of "
        "the assistant.",
        minItems=1,
    )
    system: Texts | None = option("What comes before the messages.")
    max_tokens: int | None = option("The most tokens of the answer. /v1/messages needs it.", minimum=1)
    stop_sequences: Items[str] | None = option(
        "Texts that end the answer, which is returned without them.", maxItems=64
    )
    stream: bool | None = option("Whether the answer comes as server-sent events.", False)
    temperature: Number | None = option("0 takes the most probable token.", minimum=0, maximum=2)
    top_p: Number | None = option(
        "Samples from the most probable tokens with this probability together.", exclusiveMinimum=0, maximum=1
    )
    top_k: int | None = option("Samples from so many most probable tokens.", minimum=-1)
    tools: Items[AnthropicTool] | None = option("Tools that the model may call.", maxItems=128)
    tool_choice: ToolChoiceBody | None = option("Whether the model calls tools, or which one.")
    thinking: Thinking | None = option("Whether the model reasons.")
    output_config: OutputConfig | None = option("Effort and format of the answer.")
    output_format: OutputFormat | None = option("An earlier place of output_config.format.")
    cache_salt: str | None = option(
        "Only requests of the tenant with the same text share cached prefixes, as in vLLM.", minLength=1, maxLength=1024
    )
    chat_template_kwargs: JsonObject | None = option(
        "Variables for the chat template, at most 262,144 characters, as vLLM has them."
    )
