"""Bodies and answers of /v1/embeddings, as OpenAI and vLLM have them."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gateway_svc.embeddings import MAX_DIMENSIONS
from gateway_svc.http_api.answer_model import AnswerModel
from gateway_svc.http_api.body_model import BodyModel, ErrorMessage, Items, JsonObject, Neutral, Notes, option
from gateway_svc.http_api.openai import unsupported_fields
from gateway_svc.http_api.openai.chat_models import ChatBody, MessageBody
from gateway_svc.http_api.openai.generation_body import CompletionBody
from gateway_svc.http_api.openai.prompt_fields import PromptField, RetentionField, SideField


class InputsBody(BodyModel):
    """The fields of bodies whose inputs each get a value."""

    model: str | None = option("Name or alias of the model; absent: the first model.")
    input: PromptField | None = option(
        "A text, token ids, or a list of at most 2,048 of them. Each gets a value of its own, and none may be empty."
    )
    messages: Items[MessageBody] | None = option(
        "A chat, in place of input: what the chat template makes of it gets a value.", minItems=1
    )
    chat_template_kwargs: JsonObject | None = option("Variables for the chat template, at most 262,144 characters.")
    add_generation_prompt: bool | None = option("Whether the text of a chat ends where an answer begins.", False)
    continue_final_message: bool | None = option("Whether the text of a chat ends with its last message, open.", False)
    truncate_prompt_tokens: int | None = option(
        "Keeps so many tokens of each input, special tokens included; -1: as many as the context has. Special tokens "
        "that the tokenizer adds to a text are kept.",
        minimum=-1,
    )
    truncation_side: SideField | None = option(
        "Where truncate_prompt_tokens takes tokens away: at the beginning or at the end of an input.", "right"
    )
    add_special_tokens: bool | None = option(
        "Whether the tokenizer adds its special tokens: by default to texts, and not to a chat, whose template writes "
        "them."
    )
    priority: int | None = option("A higher one goes first.", 0, minimum=-(2**31), maximum=2**31 - 1)
    retention: RetentionField | None = option(
        "How long the records of the inputs are kept: none, until_end, or seconds after their end.", "none"
    )


class EmbeddingsBody(InputsBody):
    """A body of /v1/embeddings."""

    elsewhere: ClassVar = (ChatBody, CompletionBody)
    unserved: ClassVar[Neutral] = unsupported_fields.EMBEDDINGS
    without_effect: ClassVar[Notes] = {"service_tier": "How to bill."}

    encoding_format: Annotated[Literal["float", "base64"], ErrorMessage('must be "float" or "base64"')] | None = option(
        "How vectors are written: as lists of numbers, or as 32-bit floats, little-endian, in base64.", "float"
    )
    dimensions: int | None = option(
        "The number of a vector's numbers that are returned, from the first on; absent: all.",
        minimum=1,
        maximum=MAX_DIMENSIONS,
    )
    pooling: Annotated[Literal["mean", "cls", "last"], ErrorMessage('must be "mean", "cls" or "last"')] | None = option(
        "How the hidden states of an input's tokens become one vector; absent: as the model's files say."
    )
    normalize: bool | None = option(
        "Whether vectors are divided by their lengths, after dimensions are cut; absent: as the model's files say."
    )
    use_activation: bool | None = option("Another name of normalize.")


class EmbeddingAnswer(AnswerModel):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int = Field(description="Which input, from 0.")
    embedding: list[float] | str = Field(description="Its numbers, or these as 32-bit floats in base64.")


class EmbeddingsUsage(AnswerModel):
    """Numbers of tokens."""

    prompt_tokens: int = Field(description="Tokens of all inputs.")
    total_tokens: int = Field(description="The same.")


class EmbeddingsAnswer(AnswerModel):
    """The vectors of all inputs, in their order."""

    id: str
    created: int = Field(description="In seconds since 1970.")
    object: Literal["list"]
    data: list[EmbeddingAnswer]
    model: str
    usage: EmbeddingsUsage
