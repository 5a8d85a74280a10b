"""Bodies and answers of Cohere's /v2/embed."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gateway_svc.embeddings import MAX_DIMENSIONS
from gateway_svc.http_api.answer_model import AnswerModel
from gateway_svc.http_api.body_model import BodyModel, ErrorMessage, Items, Neutral, option
from gateway_svc.http_api.embeddings.models import EmbeddingsBody
from gateway_svc.http_api.openai import unsupported_fields
from gateway_svc.http_api.openai.prompt_fields import RetentionField

Numbers = list[float]  # CohereEmbeddings has a field of the name float


class CohereEmbedBody(BodyModel):
    """A body of /v2/embed."""

    elsewhere: ClassVar = (EmbeddingsBody,)
    unserved: ClassVar[Neutral] = unsupported_fields.COHERE_EMBED

    model: str | None = option("Name or alias of the model; absent: the first model.")
    texts: Items[str] | None = option("At most 2,048 texts. Each becomes a vector, and none may be empty.")
    input_type: (
        Annotated[
            Literal["search_document", "search_query", "classification", "clustering"],
            ErrorMessage('must be "search_document", "search_query", "classification" or "clustering"'),
        ]
        | None
    ) = option("What the vectors are for; a text has the same one for all uses.")
    embedding_types: (
        Items[
            Annotated[
                Literal["float", "base64", "binary", "ubinary"],
                ErrorMessage('must be "float", "base64", "binary" or "ubinary"'),
            ]
        ]
        | None
    ) = option(
        "How the answer has vectors: as numbers, as 32-bit floats, little-endian, in base64, or as a bit for each "
        "number, 1 from 0 up, eight in an integer of -128 to 127 (binary) or 0 to 255 (ubinary).",
        ["float"],
    )
    output_dimension: int | None = option(
        "The number of a vector's numbers that are returned, from the first on; absent: all.",
        minimum=1,
        maximum=MAX_DIMENSIONS,
    )
    truncate: Annotated[Literal["NONE", "START", "END"], ErrorMessage('must be "NONE", "START" or "END"')] | None = (
        option("Where a text is cut that has more tokens than max_tokens or the context; NONE: it is refused.", "END")
    )
    max_tokens: int | None = option(
        "The most tokens of a text, special tokens included; absent: those of the context. Not with truncate NONE.",
        minimum=1,
    )
    priority: int | None = option("A higher one goes first.", 0, minimum=-(2**31), maximum=2**31 - 1)
    retention: RetentionField | None = option(
        "How long the records of the texts are kept: none, until_end, or seconds after their end.", "none"
    )


class CohereEmbeddings(AnswerModel):
    """The vectors of all texts, in their order, in each form that was asked for."""

    float: list[Numbers] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereApiVersion(AnswerModel):
    """The version of Cohere's API."""

    version: Literal["2"]


class CohereBilledUnits(AnswerModel):
    """Numbers of tokens."""

    input_tokens: int = Field(description="Tokens of all texts.")
    image_tokens: Literal[0]


class CohereMeta(AnswerModel):
    """Of the call."""

    api_version: CohereApiVersion
    billed_units: CohereBilledUnits


class CohereEmbedAnswer(AnswerModel):
    """An answer of /v2/embed."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: CohereEmbeddings
    texts: list[str] = Field(description="As they were sent.")
    meta: CohereMeta
