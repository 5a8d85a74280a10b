"""Answers in Anthropic's format, for the document of the HTTP API. `answers.py` writes them."""

from typing import Any, Literal

from pydantic import Field

from gateway_svc.http_api.answer_model import AnswerModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(AnswerModel):
    """Numbers of tokens."""

    input_tokens: int = Field(description="Of the prompt, without those from the cache.")
    cache_creation_input_tokens: int = Field(description="Always 0.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt whose KV was in the prefix cache.")
    output_tokens: int = Field(description="Tokens that were generated.")


class TextAnswer(AnswerModel):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingAnswer(AnswerModel):
    """Reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Always empty.")


class ToolUseAnswer(AnswerModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(description="The arguments; in a stream empty at first.")


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessageAnswer(AnswerModel):
    """An answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[AnswerBlock]
    model: str
    stop_reason: StopReason | None
    stop_sequence: str | None = Field(description="The text of stop_sequences that ended the answer.")
    usage: MessageUsage


class MessageEnd(AnswerModel):
    """The end of a message."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageEvent(AnswerModel):
    """The data of an event of /v1/messages. The event's name is the type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: MessageAnswer | None = Field(None, description="At the start, without content.")
    index: int | None = Field(None, description="The block's.")
    content_block: AnswerBlock | None = Field(None, description="A block that begins.")
    delta: MessageEnd | dict[str, str] | None = Field(
        None,
        description="A text_delta, thinking_delta or input_json_delta of a block, with text, thinking or partial_json; "
        "or how the message ends.",
    )
    usage: MessageUsage | None = Field(None, description="With the end of the message.")


class TokenCount(AnswerModel):
    """The number of tokens of a prompt."""

    input_tokens: int


class ThreadRefusal(AnswerModel):
    """What the tool runners of Anthropic's clients read where threads are not served."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: list[str]


class AnthropicErrorDetail(AnswerModel):
    """An error."""

    type: str
    message: str = Field(description="Begins with the field, if it is about one.")
    details: ThreadRefusal | None = Field(None, description="Only of a request with a thread.")


class AnthropicError(AnswerModel):
    """The body of an error."""

    type: Literal["error"]
    error: AnthropicErrorDetail
