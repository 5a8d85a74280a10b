"""Bodies of /score and /rerank as pairs of texts."""

from dataclasses import dataclass
from enum import Enum

from gateway_svc.field_paths import Field, NamedFields
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai.prompt_fields import read_retention
from gateway_svc.http_api.scoring.models import RerankBody, ScoreBody, SimilarityBody, TextObject
from gateway_svc.scores import UnvalidatedScores, pair_inputs, text_inputs
from gateway_svc.similarity import InputPairs
from gateway_svc.validated_request import TruncationSide
from gateway_svc.value_inputs import ValueInput

_Text = str | TextObject

_QUERY_LIMIT, _DOCUMENT_LIMIT = "max_tokens_per_query", "max_tokens_per_doc"
_FORMS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
"""Names of both sides of the pairs of a ScoreBody."""


class RankingForm(Enum):
    """The form of an answer of /rerank, by the name of the documents in the body."""

    RESULTS = "documents"
    LIST = "texts"


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """What is to be scored, and what the answer has of it. `texts` are those of the documents; None: it has none."""

    unvalidated: UnvalidatedScores
    top_n: int | None
    texts: list[str] | None
    form: RankingForm


def read_score(body: ScoreBody, _: str | None = None) -> UnvalidatedScores:
    """The pairs of a body. Raises QuireError."""
    first, second = _form(body)
    firsts = _inputs(first, getattr(body, first), _QUERY_LIMIT, body.max_tokens_per_query)
    seconds = _inputs(second, getattr(body, second), _DOCUMENT_LIMIT, body.max_tokens_per_doc)
    return _unvalidated(body, second, pair_inputs(first, second, firsts, seconds))


def read_rerank(body: RerankBody, _: str | None = None) -> RerankRequest:
    """The query and the documents of a body. Raises QuireError."""
    if body.query is None:
        raise invalid("query", "must be given")
    form = RankingForm.RESULTS if body.texts is None else RankingForm.LIST
    given = body.documents if body.texts is None else body.texts
    if given is None:
        raise invalid("documents", "must be given")
    if None not in (body.documents, body.texts):
        raise invalid("texts", "must not be beside documents")
    if body.top_n is not None and body.top_n < 0:
        raise invalid("top_n", "must be at least 0")
    query = _inputs("query", body.query, _QUERY_LIMIT, body.max_tokens_per_query)
    documents = _inputs(form.value, given, _DOCUMENT_LIMIT, body.max_tokens_per_doc)
    has_texts = body.return_documents is not False if form is RankingForm.RESULTS else body.return_text is True
    return RerankRequest(
        _unvalidated(body, form.value, pair_inputs("query", form.value, query, documents)),
        top_n=body.top_n or None,
        texts=[_text(one) for one in _listed(given)] if has_texts else None,
        form=form,
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


def _inputs(field: str, value: _Text | list[_Text], limit_field: str, max_tokens: int | None) -> list[ValueInput]:
    """The texts of one side. Raises QuireError."""
    texts, where = [], []
    for index, text in enumerate(_listed(value)):
        place = f"{field}[{index}]" if isinstance(value, list) else field
        texts.append(_text(text))
        where.append(f"{place}.text" if isinstance(text, TextObject) else place)
    return text_inputs(field, texts, where, limit_field, max_tokens or None)


def _unvalidated(body: SimilarityBody, field: str, pairs: InputPairs) -> UnvalidatedScores:
    if None not in (body.use_activation, body.raw_scores) and body.use_activation == body.raw_scores:
        raise invalid("raw_scores", "is the opposite of use_activation, and must not have its value")
    if None not in (body.instruction, body.instruct):
        raise invalid("instruct", "must not be beside instruction")
    instruction, name = (body.instruction, "instruction") if body.instruct is None else (body.instruct, "instruct")
    return UnvalidatedScores(
        pairs,
        field_path=NamedFields({Field.PROMPT: field, Field.INSTRUCTION: name}),
        model=body.model,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=TruncationSide(body.truncation_side or "right"),
        is_raw=body.use_activation is False or body.raw_scores is True,
        priority=body.priority,
        retention=read_retention(body.retention),
        instruction=instruction,
    )


def _listed(value: _Text | list[_Text]) -> list[_Text]:
    return value if isinstance(value, list) else [value]


def _text(value: _Text) -> str:
    return value.text if isinstance(value, TextObject) else value
