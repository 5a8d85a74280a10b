"""Bodies of /score and /rerank as pairs of inputs."""

from dataclasses import dataclass

from gateway_svc.embeddings import MAX_TEXT_TOKENS, EmbeddingInput, UnvalidatedEmbeddings, input_fields
from gateway_svc.field_paths import Field, NamedFields
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai.prompt_fields import read_retention
from gateway_svc.http_api.scoring.models import MAX_TEXTS, RerankBody, ScoreBody, SimilarityBody, TextObject
from gateway_svc.similarity import InputPairs
from gateway_svc.unvalidated_request import TextPrompt
from gateway_svc.validated_request import TruncationSide

_Text = str | TextObject

_QUERY_LIMIT, _DOCUMENT_LIMIT = "max_tokens_per_query", "max_tokens_per_doc"
_FORMS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
"""Names of both sides of the pairs of a ScoreBody."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What is to be compared."""

    pairs: InputPairs
    unvalidated: UnvalidatedEmbeddings


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """What is to be compared, and what the answer has of it. `texts` are those of the documents; None: it has none."""

    score: ScoreRequest
    top_n: int | None
    texts: list[str] | None


def read_score(body: ScoreBody, _: str | None = None) -> ScoreRequest:
    """The pairs of a body. Raises QuireError."""
    first, second = _form(body)
    firsts = _inputs(first, getattr(body, first), _QUERY_LIMIT, body.max_tokens_per_query)
    seconds = _inputs(second, getattr(body, second), _DOCUMENT_LIMIT, body.max_tokens_per_doc)
    if len(firsts) not in (1, len(seconds)):
        raise invalid(first, f"must be one text, or as many as {second}")
    return _request(body, second, InputPairs.of(firsts, seconds))


def read_rerank(body: RerankBody, _: str | None = None) -> RerankRequest:
    """The query and the documents of a body. Raises QuireError."""
    if body.query is None:
        raise invalid("query", "must be given")
    if body.documents is None:
        raise invalid("documents", "must be given")
    if body.top_n is not None and body.top_n < 0:
        raise invalid("top_n", "must be at least 0")
    query = _inputs("query", body.query, _QUERY_LIMIT, body.max_tokens_per_query)
    documents = _inputs("documents", body.documents, _DOCUMENT_LIMIT, body.max_tokens_per_doc)
    texts = [_text(one) for one in _listed(body.documents)]
    return RerankRequest(
        _request(body, "documents", InputPairs.of(query, documents)),
        top_n=body.top_n or None,
        texts=None if body.return_documents is False else texts,
    )


def _form(body: ScoreBody) -> tuple[str, str]:
    """The names of the two sides that a body has. Raises QuireError."""
    names = {name for form in _FORMS for name in form}
    given = {name for name in names if getattr(body, name) is not None}
    form = max(_FORMS, key=lambda one: len(given.intersection(one)))
    for name in form:
        if name not in given:
            raise invalid(name, "must be given")
    if others := given.difference(form):
        raise invalid(min(others), f"must not be beside {form[0]} and {form[1]}")
    return form


def _inputs(field: str, value: _Text | list[_Text], limit_field: str, max_tokens: int | None) -> list[EmbeddingInput]:
    """The texts of one side. Raises QuireError."""
    texts = _listed(value)
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise invalid(field, f"must hold 1 to {MAX_TEXTS} texts")
    inputs = []
    for index, text in enumerate(texts):
        where = f"{field}[{index}]" if isinstance(value, list) else field
        if isinstance(text, TextObject):
            where = f"{where}.text"
        names = input_fields(where, where, where, {MAX_TEXT_TOKENS: limit_field})
        inputs.append(EmbeddingInput(TextPrompt(_text(text)), names, max_tokens or None))
    return inputs


def _request(body: SimilarityBody, field: str, pairs: InputPairs) -> ScoreRequest:
    unvalidated = UnvalidatedEmbeddings(
        inputs=pairs.inputs,
        field_path=NamedFields({Field.PROMPT: field}),
        model=body.model,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=TruncationSide(body.truncation_side or "right"),
        priority=body.priority,
        retention=read_retention(body.retention),
    )
    return ScoreRequest(pairs, unvalidated)


def _listed(value: _Text | list[_Text]) -> list[_Text]:
    return value if isinstance(value, list) else [value]


def _text(value: _Text) -> str:
    return value.text if isinstance(value, TextObject) else value
