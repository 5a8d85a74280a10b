"""Bodies of Ollama's /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show."""

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from gateway_svc.embeddings import MAX_DIMENSIONS
from gateway_svc.http_api.body_model import (
    BodyModel,
    ErrorMessage,
    Items,
    JsonObject,
    Neutral,
    Notes,
    Number,
    OneOrMoreTexts,
    option,
    tag,
)
from gateway_svc.http_api.embeddings.models import EmbeddingsBody
from gateway_svc.http_api.openai.chat_models import ChatBody, ToolBody
from gateway_svc.http_api.openai.generation_body import CompletionBody

_OF_THE_PROCESS = "Of the process that runs the model."


class OllamaOptions(BodyModel):
    """How the answer is generated."""

    unserved: ClassVar[Neutral] = {
        "mirostat": (0,),
        "mirostat_eta": (0.1,),
        "mirostat_tau": (5,),
        "penalize_newline": (True,),
        "repeat_last_n": (-1, 64),
        "tfs_z": (1,),
    }
    without_effect: ClassVar[Notes] = dict.fromkeys(
        (
            "embedding_only",
            "f16_kv",
            "logits_all",
            "low_vram",
            "main_gpu",
            "num_batch",
            "num_ctx",
            "num_gpu",
            "num_keep",
            "num_thread",
            "numa",
            "use_mlock",
            "use_mmap",
            "vocab_only",
        ),
        _OF_THE_PROCESS,
    )

    num_predict: int | None = option(
        "The most tokens of the answer; -1 and -2, as absent: as the model's files or the operator say, else what the "
        "context leaves.",
        -1,
    )
    temperature: Number | None = option("0 takes the most probable token.", minimum=0, maximum=2)
    top_k: int | None = option("Samples from so many most probable tokens; 0 or -1: from all.", minimum=-1)
    top_p: Number | None = option("Samples from the most probable tokens with this probability.", maximum=1)
    min_p: Number | None = option("The least probability of a token, relative to the most probable one.", maximum=1)
    typical_p: Number | None = option("Samples from the most typical tokens with this probability.", maximum=1)
    repeat_penalty: Number | None = option("Divides logits of tokens that occurred, in the prompt too.", maximum=10)
    presence_penalty: Number | None = option("Penalty of tokens that the answer has.", minimum=-2, maximum=2)
    frequency_penalty: Number | None = option("Penalty of tokens, times their count.", minimum=-2, maximum=2)
    seed: int | None = option("Repeats the samples of another request.")
    stop: OneOrMoreTexts | None = option("Texts that end the answer, which is returned without them.")


class OllamaCalledFunction(BodyModel):
    """A call of a function."""

    name: str = Field(description="The function.")
    arguments: JsonObject | None = option("Its arguments.")


class OllamaCall(BodyModel):
    """A call in a message of the assistant."""

    id: str | None = option("The call's id.")
    function: OllamaCalledFunction = Field(description="The call.")


class OllamaMessage(BodyModel):
    """A message of a chat."""

    unserved: ClassVar[Neutral] = {"images": ([],)}

    role: str = Field(description="system, user, assistant, tool, or a role of the model's template.")
    content: str | None = option("The text.")
    thinking: str | None = option("The assistant's reasoning.")
    tool_calls: Items[OllamaCall] | None = option("Calls that the assistant made.")
    tool_name: str | None = option("The tool whose result this is, in a message of the role tool.")
    tool_call_id: str | None = option("The call whose result this is; else the next one of the tool.")


_Format = Annotated[
    Annotated[Literal["json", ""], ErrorMessage("must be json, or a JSON Schema"), Tag(tag("name"))]
    | Annotated[JsonObject, Tag(tag("schema"))],
    Discriminator(lambda value: tag("name") if isinstance(value, str) else tag("schema")),
]
_Think = Annotated[bool | Literal["low", "medium", "high"], ErrorMessage("must be true, false, low, medium or high")]


class OllamaBody(BodyModel):
    """The fields that bodies of /api/chat and /api/generate share."""

    unserved: ClassVar[Neutral] = {
        "context": ([],),
        "images": ([],),
        "shift": (False,),
        "template": ("",),
        "truncate": (False,),
    }

    model: str | None = option("Name or alias of the model, with or without :latest; absent: the first model.")
    format: _Format | None = option("What the answer must match: json, or a JSON Schema.")
    options: OllamaOptions | None = option("How the answer is generated.")
    stream: bool | None = option("Whether the answer comes in lines of JSON.", True)
    think: _Think | None = option("Whether the model reasons, if its template takes that.")
    logprobs: bool | None = option("Whether to return the log-probability of each token.", False)
    top_logprobs: int | None = option(
        "With logprobs: the number of most probable tokens to return for each.", 0, minimum=0
    )


class OllamaChatBody(OllamaBody):
    """A body of /api/chat."""

    elsewhere: ClassVar = (ChatBody, CompletionBody)
    unserved: ClassVar[Neutral] = {**OllamaBody.unserved, "prompt": ("",), "suffix": ("",)}

    messages: Items[OllamaMessage] | None = option("The chat, oldest message first.")
    tools: Items[ToolBody] | None = option("Tools that the model may call.", maxItems=128)


class OllamaGenerateBody(OllamaBody):
    """A body of /api/generate."""

    elsewhere: ClassVar = (ChatBody, CompletionBody)
    unserved: ClassVar[Neutral] = {
        **OllamaBody.unserved,
        "height": (0,),
        "messages": ([],),
        "steps": (0,),
        "tools": ([],),
        "width": (0,),
    }

    prompt: str | None = option("What the user says.")
    system: str | None = option("What comes before the prompt.")
    suffix: str | None = option("The text behind the gap that the answer fills, if the model has tokens for that.", "")
    raw: bool | None = option("Whether the prompt is continued as it is, without the model's chat template.", False)


class OllamaEmbedOptions(BodyModel):
    """Options of a call for embeddings."""

    without_effect: ClassVar[Notes] = {
        **dict.fromkeys(sorted(OllamaOptions.known_fields()), "How an answer is generated."),
        **OllamaOptions.without_effect,
    }


class OllamaEmbeddingsBase(BodyModel):
    """The fields that bodies of /api/embed and /api/embeddings share."""

    model: str | None = option("Name or alias of the model, with or without :latest; absent: the first model.")
    truncate: bool | None = option(
        "Whether a text with more tokens than the context is cut at its end; it is rejected otherwise.", True
    )
    options: OllamaEmbedOptions | None = option("None of them has an effect.")


class OllamaEmbedBody(OllamaEmbeddingsBase):
    """A body of /api/embed."""

    elsewhere: ClassVar = (EmbeddingsBody, OllamaChatBody, OllamaGenerateBody)

    input: OneOrMoreTexts | None = option("A text, or at most 2,048 of them. Each becomes a vector of the length 1.")
    dimensions: int | None = option(
        "The number of a vector's numbers that are returned, from the first on; absent: all.",
        minimum=1,
        maximum=MAX_DIMENSIONS,
    )


class OllamaEmbeddingsBody(OllamaEmbeddingsBase):
    """A body of /api/embeddings."""

    elsewhere: ClassVar = (EmbeddingsBody, OllamaChatBody, OllamaGenerateBody)

    prompt: str | None = option("A text. It becomes a vector, which is not normalized.")


class ShowBody(BodyModel):
    """A body of /api/show."""

    without_effect: ClassVar[Notes] = {"verbose": "The answer has no large fields."}

    model: str | None = option("Name or alias of the model.")
    name: str | None = option("An earlier name of model.")
