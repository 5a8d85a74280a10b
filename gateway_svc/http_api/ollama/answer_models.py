"""Answers in Ollama's format, for the document of the HTTP API. `answers.py` and `routes.py` write them."""

from typing import Any, Literal

from pydantic import Field

from gateway_svc.http_api.answer_model import AnswerModel


class OllamaAnswerFunction(AnswerModel):
    """A call of a function."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaAnswerCall(AnswerModel):
    """A call of a tool."""

    id: str
    function: OllamaAnswerFunction


class OllamaAnswerMessage(AnswerModel):
    """A message of the assistant, or a part of it in a line."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaAnswerCall] | None = None


class OllamaTokenLogprob(AnswerModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] = Field(description="The token's bytes.")


class OllamaLogprob(OllamaTokenLogprob):
    """A token of the answer and its log-probability."""

    top_logprobs: list[OllamaTokenLogprob] | None = Field(None, description="The most probable tokens in its place.")


class OllamaEnd(AnswerModel):
    """What answers and lines share. Durations are in nanoseconds, as the gateway measures them."""

    model: str
    created_at: str = Field(description="In UTC, as RFC 3339 has it.")
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = Field(None, description="In the last line.")
    total_duration: int | None = None
    load_duration: int | None = Field(None, description="Always 0.")
    prompt_eval_count: int | None = Field(None, description="Tokens of the prompt.")
    prompt_eval_duration: int | None = Field(None, description="Up to the first output.")
    eval_count: int | None = Field(None, description="Tokens that were generated.")
    eval_duration: int | None = Field(None, description="From the first output on.")
    logprobs: list[OllamaLogprob] | None = Field(None, description="Of the tokens that were generated, if asked for.")


class OllamaChatAnswer(OllamaEnd):
    """An answer of /api/chat, or a line of one."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaEnd):
    """An answer of /api/generate, or a line of one."""

    response: str
    thinking: str | None = None


class OllamaEmbedAnswer(AnswerModel):
    """The vectors of all inputs, in their order. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | None = Field(None, description="From the request's arrival on.")
    load_duration: int | None = Field(None, description="Always 0.")
    prompt_eval_count: int | None = Field(None, description="Tokens of all inputs.")


class OllamaEmbeddingsAnswer(AnswerModel):
    """The vector of a prompt."""

    embedding: list[float] = Field(description="Its numbers; empty without a prompt.")


class OllamaDetails(AnswerModel):
    """Of a model's file: unknown to a gateway."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaReadyModel(AnswerModel):
    """A model that is ready, by one of its names."""

    name: str
    model: str
    size: int = Field(description="Always 0.")
    digest: str = Field(description="Always empty.")
    details: OllamaDetails


class OllamaModel(OllamaReadyModel):
    """A model in the list of models."""

    modified_at: str = Field(description="When the gateway started.")


class OllamaModels(AnswerModel):
    """The models that are ready."""

    models: list[OllamaModel]


class OllamaLoadedModel(OllamaReadyModel):
    """A model in the list of loaded models."""

    size_vram: int = Field(description="Always 0.")
    expires_at: str = Field(description="In the year 9999: models stay loaded.")
    context_length: int


class OllamaLoadedModels(AnswerModel):
    """The models that are ready."""

    models: list[OllamaLoadedModel]


class OllamaModelInfo(AnswerModel):
    """One model."""

    modelfile: str
    parameters: str = Field(description="The operator's defaults, one in each line.")
    template: str = Field(description="The chat template.")
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[Literal["completion", "insert", "embedding", "tools", "thinking"]]
    modified_at: str


class OllamaError(AnswerModel):
    """The body of an error, or the last line of a stream that fails."""

    error: str = Field(description="Begins with the field, if it is about one.")
