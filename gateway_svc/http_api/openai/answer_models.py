"""Answers in the formats of OpenAI's API, for the document of the HTTP API. `answers.py` writes them."""

from typing import Literal

from pydantic import Field

from gateway_svc.http_api.answer_model import AnswerModel


class CachedTokens(AnswerModel):
    """Details of the tokens of prompts."""

    cached_tokens: int = Field(description="Tokens whose KV was in the prefix cache.")


class ReasoningTokens(AnswerModel):
    """Details of the tokens that were generated."""

    reasoning_tokens: int = Field(description="Tokens of reasoning.")


class UsageAnswer(AnswerModel):
    """Numbers of tokens."""

    prompt_tokens: int = Field(description="Tokens of all prompts.")
    completion_tokens: int = Field(
        description="Tokens that were generated, those of answers that are not returned included."
    )
    total_tokens: int = Field(description="Their sum.")
    prompt_tokens_details: CachedTokens | None = Field(None, description="Not in the usage of single events.")
    completion_tokens_details: ReasoningTokens | None = Field(None, description="Not in the usage of single events.")


class Finished(AnswerModel):
    """The end of a choice."""

    stop_reason: str | int | None = Field(None, description="The client's stop string or stop token that ended it.")
    seed: int | None = Field(None, description="Repeats the samples.")
    token_ids: list[int] | None = Field(None, description="Tokens of the output, with return_token_ids.")


class CompletionLogprobs(AnswerModel):
    """Log-probabilities of a text's tokens. A probability of 0 is -9999."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for the first token of an echoed prompt.")
    top_logprobs: list[dict[str, float] | None] = Field(
        description="The most probable tokens, requested ones, and the token itself."
    )
    text_offset: list[int] = Field(description="Where each token begins in the text, in characters.")


class PromptToken(AnswerModel):
    """The log-probability of a token at one position of a prompt."""

    logprob: float
    rank: int | None = Field(description="Among the most probable tokens that are returned, from 1.")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionChoice(Finished):
    """One text, or a part of it in an event."""

    prompt_token_ids: list[int] | None = Field(
        None, description="Tokens of the prompt, with return_token_ids; in a stream in the first event of a choice."
    )

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = Field(
        None, description="Of each token of the prompt, by token ids; null for the first one. Not in events."
    )
    finish_reason: Literal["stop", "length"] | None = Field(description="null in events before the last one.")


class Generated(AnswerModel):
    """What answers and events have in common."""

    id: str
    created: int = Field(description="In seconds since 1970.")
    model: str
    system_fingerprint: str = Field(description="Names the release and the model's tokenizer.")
    service_tier: Literal["default"] | None = Field(None, description="If the request has the field.")


class CompletionAnswer(Generated):
    """An answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice] = Field(description="Prompt by prompt.")
    usage: UsageAnswer


class CompletionEvent(Generated):
    """The data of an event of /v1/completions. The last event has [DONE] instead."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice] = Field(description="Empty in the event with the usage.")
    usage: UsageAnswer | None = Field(None, description="In the last event before [DONE], or in each, if requested.")


class TopToken(AnswerModel):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class SampledToken(TopToken):
    """A token of the answer."""

    top_logprobs: list[TopToken]


class ChatLogprobs(AnswerModel):
    """Log-probabilities of an answer's tokens."""

    content: list[SampledToken]
    refusal: None


class AnswerFunction(AnswerModel):
    """A call of a function, or a part of it in an event."""

    name: str | None = None
    arguments: str = Field(description="A JSON object as text.")


class AnswerCustomTool(AnswerModel):
    """A call of a custom tool, or a part of it in an event."""

    name: str | None = None
    input: str = Field(description="The text that it takes.")


class AnswerCall(AnswerModel):
    """A call of a tool. In events, the first part has id, type and name."""

    index: int | None = Field(None, description="In events.")
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: AnswerFunction | None = Field(None, description="Of the type function.")
    custom: AnswerCustomTool | None = Field(None, description="Of the type custom.")


class AnswerMessage(AnswerModel):
    """A message of the assistant, or a part of it in an event."""

    role: Literal["assistant"] | None = Field(
        None, description="In a stream in the first event of a choice, which has no text of the output."
    )
    content: str | None = None
    refusal: None = None
    reasoning: str | None = Field(None, description="null in a whole message without reasoning.")
    reasoning_content: str | None = Field(None, description="The same as reasoning, where there is any.")
    tool_calls: list[AnswerCall] | None = None
    function_call: AnswerFunction | None = Field(None, description="In the legacy form.")


class ChatFinish(Finished):
    """One answer."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] | None = Field(
        description="null in events before the last one."
    )


class ChatChoice(ChatFinish):
    """One answer of several."""

    message: AnswerMessage


class ChatEventChoice(ChatFinish):
    """A part of one answer."""

    delta: AnswerMessage


class ChatAnswer(Generated):
    """An answer of /v1/chat/completions."""

    prompt_token_ids: list[int] | None = Field(
        None, description="Tokens of the prompt, with return_token_ids; in a stream in the first event of a choice."
    )
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobs | None = Field(
        None, description="Of each token of the prompt, by token ids; null for the first one."
    )


class ChatEvent(Generated):
    """The data of an event of /v1/chat/completions. The last event has [DONE] instead."""

    prompt_token_ids: list[int] | None = Field(
        None, description="Tokens of the prompt, with return_token_ids; in a stream in the first event of a choice."
    )
    object: Literal["chat.completion.chunk"]
    choices: list[ChatEventChoice] = Field(description="Empty in the event with the usage.")
    usage: UsageAnswer | None = Field(None, description="In the last event before [DONE], or in each, if requested.")


class ModelCard(AnswerModel):
    """A model that is ready, by one of its names. The last three fields are those of Anthropic's API."""

    id: str
    object: Literal["model"]
    created: int = Field(description="When the gateway started, in seconds since 1970.")
    owned_by: Literal["quire"]
    root: str = Field(description="The model's name, where the id is an alias.")
    max_model_len: int = Field(description="The length of the context, in tokens.")
    type: Literal["model"]
    display_name: str
    created_at: str = Field(description="When the gateway started, in UTC, as RFC 3339 has it.")


class ModelCards(AnswerModel):
    """The models that are ready. The last three fields are those of Anthropic's API."""

    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class ErrorDetail(AnswerModel):
    """An error."""

    message: str
    type: str
    param: str | None = Field(description="The field, as the body spells it, or the header.")
    code: str = Field(description="The machine-readable reason.")


class ErrorAnswer(AnswerModel):
    """The body of an error."""

    error: ErrorDetail
