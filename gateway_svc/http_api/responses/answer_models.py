"""Answers of the Responses API, for the document of the HTTP API. `events.py` and `output_items.py` write them."""

from typing import Any, Literal

from pydantic import Field

from gateway_svc.http_api.answer_model import AnswerModel
from gateway_svc.http_api.openai.answer_models import SampledToken


class OutputTextPart(AnswerModel):
    """A part of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(description="Always empty.")
    logprobs: list[SampledToken] = Field(description="Of the text's tokens, if they were asked for.")


class ReasoningPart(AnswerModel):
    """A part of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(AnswerModel):
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputTextPart]


class OutputReasoning(AnswerModel):
    """Reasoning of the model."""

    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any] = Field(description="Always empty: the reasoning itself is in the content.")
    content: list[ReasoningPart]


class OutputCall(AnswerModel):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str = Field(description="The call, to which its output refers.")
    name: str
    namespace: str | None = Field(None, description="The function's namespace, if it is in one.")
    arguments: str = Field(description="A JSON object as text.")


class OutputCustomCall(AnswerModel):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str = Field(description="The call, to which its output refers.")
    name: str
    input: str = Field(description="The text that the tool takes.")


class ResponseInputDetails(AnswerModel):
    """Details of the tokens of the input."""

    cached_tokens: int = Field(description="Tokens whose KV was in the prefix cache.")
    cache_write_tokens: int = Field(description="Always 0.")


class ResponseOutputDetails(AnswerModel):
    """Details of the tokens of the output."""

    reasoning_tokens: int = Field(description="Tokens of reasoning.")


class ResponseUsageAnswer(AnswerModel):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ResponseErrorAnswer(AnswerModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(AnswerModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(AnswerModel):
    """A response. Fields of the request come back as they were sent, or with their defaults."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="In seconds since 1970.")
    completed_at: int | None = Field(
        description="In seconds since 1970, of a response that is retrieved after it has completed; otherwise null."
    )
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    error: ResponseErrorAnswer | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool = Field(description="Whether it can be retrieved.")
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsageAnswer | None = Field(description="Absent until the response has ended.")
    user: str | None


class ResponseEvent(AnswerModel):
    """An event of a response. Its other fields follow from its type, as in OpenAI's API."""

    type: str = Field(description="The type of the event, which is also its name.")
    sequence_number: int = Field(description="Counts the events of a response from 0.")
    response: ResponseAnswer | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | None = None
    part: OutputTextPart | ReasoningPart | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[SampledToken] | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None


class DeletedResponse(AnswerModel):
    """A response that was removed."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(AnswerModel):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseItems(AnswerModel):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
