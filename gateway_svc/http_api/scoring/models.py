"""Bodies and answers of /score, as vLLM has them, and of /rerank, as Jina, Cohere, vLLM and TEI have them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, RootModel, Tag

from gateway_svc.http_api.answer_model import AnswerModel
from gateway_svc.http_api.body_model import BodyModel, Items, Neutral, Notes, option, tag
from gateway_svc.http_api.embeddings.models import EmbeddingsBody, EmbeddingsUsage
from gateway_svc.http_api.openai import unsupported_fields
from gateway_svc.http_api.openai.prompt_fields import RetentionField, SideField


class TextObject(BodyModel):
    """A text as an object."""

    unserved: ClassVar[Neutral] = {"content": (), "image": (), "multi_modal": ()}

    text: str = Field(description="The text.")


def _kind_of_text(value: Any) -> str | None:
    match value:
        case str():
            return tag("text")
        case dict() | TextObject():
            return tag("object")
    return None


def _kind_of_texts(value: Any) -> str | None:
    if isinstance(value, list):
        return tag("list")
    return tag("one") if _kind_of_text(value) else None


TextField = Annotated[
    Annotated[str, Tag(tag("text"))] | Annotated[TextObject, Tag(tag("object"))],
    Discriminator(
        _kind_of_text,
        custom_error_type="misfit",
        custom_error_message="must be a string, or an object with a text",
    ),
]
"""A text."""

TextsField = Annotated[
    Annotated[TextField, Tag(tag("one"))] | Annotated[Items[TextField], Tag(tag("list"))],
    Discriminator(
        _kind_of_texts,
        custom_error_type="misfit",
        custom_error_message="must be a string, an object with a text, or a list of those",
    ),
]
"""A text, or a list of texts."""

_MANY = "A text, or a list of at most 1,024."
_SCORE = "The output of a cross-encoder for the pair, else the cosine of the vectors of its texts: -1 to 1."


class SimilarityBody(BodyModel):
    """The fields that bodies of /score and /rerank share."""

    without_effect: ClassVar[Notes] = unsupported_fields.SIMILARITY_WITHOUT_EFFECT

    model: str | None = option("Name or alias of the model; absent: the first model.")
    max_tokens_per_query: int | None = option(
        "Cuts queries to so many tokens, not counting special ones; 0: they are not cut.", 0, minimum=0
    )
    max_tokens_per_doc: int | None = option(
        "Cuts documents to so many tokens, not counting special ones; 0: they are not cut.", 0, minimum=0
    )
    truncate_prompt_tokens: int | None = option(
        "Cuts each pair with a cross-encoder, and each text with a model that computes embeddings, to so many tokens, "
        "special ones included; -1: as many as the context has. Of a pair, the longer text is cut first.",
        minimum=-1,
    )
    truncation_side: SideField | None = option("Where texts are cut: at the beginning or at the end.", "right")
    use_activation: bool | None = option(
        "Whether a cross-encoder's activation function is applied, if it has one. A cosine has none.", True
    )
    raw_scores: bool | None = option("The opposite of use_activation.", False)
    instruction: str | None = option(
        "What the query asks for, for models whose chat template writes an instruction beside a pair of texts; absent: "
        "that of the model's files, if they have one."
    )
    instruct: str | None = option("Another name of instruction, as in SGLang.")
    priority: int | None = option("A higher one goes first.", 0, minimum=-(2**31), maximum=2**31 - 1)
    retention: RetentionField | None = option(
        "How long the records of the prompts are kept: none, until_end, or seconds after their end.", "none"
    )


class ScoreBody(SimilarityBody):
    """A body of /score. It has queries with documents or items, or text_1 with text_2, or data_1 with data_2."""

    elsewhere: ClassVar = (EmbeddingsBody,)
    unserved: ClassVar[Neutral] = unsupported_fields.SCORE

    queries: TextsField | None = option(f"What is compared with documents, or with items. {_MANY}")
    documents: TextsField | None = option(f"What one query, or the query at the same place, is compared with. {_MANY}")
    items: TextsField | None = option("Another name of documents.")
    text_1: TextsField | None = option("Another name of queries, beside text_2.")
    text_2: TextsField | None = option("Another name of documents, beside text_1.")
    data_1: TextsField | None = option("Another name of queries, beside data_2.")
    data_2: TextsField | None = option("Another name of documents, beside data_1.")


class RerankBody(SimilarityBody):
    """A body of /rerank."""

    elsewhere: ClassVar = (ScoreBody, EmbeddingsBody)
    unserved: ClassVar[Neutral] = unsupported_fields.RERANK

    query: TextField | None = option("What documents are compared with.")
    documents: TextsField | None = option(f"What is sorted. {_MANY}")
    texts: TextsField | None = option("Another name of documents, as in TEI: the answer is a list of scores.")
    top_n: int | None = option("How many documents the answer has; 0: all.", 0, minimum=0)
    return_documents: bool | None = option("Whether an answer for documents has their texts.", True)
    return_text: bool | None = option("Whether an answer for texts has them.", False)


class PairScore(AnswerModel):
    """The score of one pair."""

    object: Literal["score"]
    index: int = Field(description="Which pair, from 0.")
    score: float = Field(description=_SCORE)


class ScoreAnswer(AnswerModel):
    """The scores of all pairs, in their order."""

    id: str
    object: Literal["list"]
    created: int = Field(description="In seconds since 1970.")
    model: str
    data: list[PairScore]
    usage: EmbeddingsUsage


class RankedDocument(AnswerModel):
    """A document as it was sent."""

    text: str


class RankedResult(AnswerModel):
    """The score of one document."""

    index: int = Field(description="Which document, from 0.")
    document: RankedDocument | None = None
    relevance_score: float = Field(description=_SCORE)


class RerankAnswer(AnswerModel):
    """Documents, that with the highest score first."""

    id: str
    model: str
    usage: EmbeddingsUsage
    results: list[RankedResult]


class RankedText(AnswerModel):
    """The score of one of texts."""

    index: int = Field(description="Which text, from 0.")
    score: float = Field(description=_SCORE)
    text: str | None = None


class RankedTexts(RootModel[list[RankedText]]):
    """Texts, that with the highest score first."""
