"""Cohere's route /v2/embed, with vLLM's fields."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.embeddings import DIMENSIONS, UnvalidatedEmbeddings
from gateway_svc.field_paths import Field, NamedFields
from gateway_svc.http_api.calls import HttpCalls, InputValues
from gateway_svc.http_api.embeddings.cohere_models import CohereEmbedAnswer, CohereEmbedBody
from gateway_svc.http_api.embeddings.routes import EncodingFormat
from gateway_svc.http_api.endpoint import HandlerDoc, HttpRoute
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai.answer_models import ErrorAnswer
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from gateway_svc.http_api.openai.prompt_fields import read_retention
from gateway_svc.tracing import Operation
from gateway_svc.unvalidated_request import TextPrompt
from gateway_svc.validated_request import TruncationSide
from gateway_svc.value_inputs import MAX_INPUTS, ValueInput, Vector, input_fields

Json = dict[str, Any]

_IN_BITS = {"binary", "ubinary"}
_NAMES: Mapping[str, str] = {
    Field.PROMPT: "texts",
    Field.TRUNCATE_PROMPT_TOKENS: "max_tokens",
    DIMENSIONS: "output_dimension",
}


@dataclass(frozen=True, slots=True)
class CohereEmbedRequest:
    """What is to be embedded, and the forms in which the answer has it."""

    unvalidated: UnvalidatedEmbeddings
    texts: list[str]
    types: Sequence[str]


def read_embed(body: CohereEmbedBody, _: str | None = None) -> CohereEmbedRequest:
    """The texts and options of a body. Raises QuireError."""
    if body.texts is None:
        raise invalid("texts", "must be given")
    if not 1 <= len(body.texts) <= MAX_INPUTS:  # before there is an object for each
        raise invalid("texts", f"must hold 1 to {MAX_INPUTS} texts")
    is_refused = body.truncate == "NONE"
    if is_refused and body.max_tokens is not None:
        raise invalid("max_tokens", "must not be beside truncate NONE, which refuses texts beyond the context")
    if body.max_tokens is not None and body.max_tokens < 1:
        raise invalid("max_tokens", "must be at least 1")
    types = list(dict.fromkeys(body.embedding_types or ["float"]))
    if body.output_dimension is not None and body.output_dimension % 8 and not _IN_BITS.isdisjoint(types):
        raise invalid("output_dimension", "must be a multiple of 8 for the binary forms")
    num_kept = -1 if body.max_tokens is None else body.max_tokens
    others: dict[str, str] = {Field.TRUNCATE_PROMPT_TOKENS: "truncate", DIMENSIONS: "output_dimension"}
    where = [f"texts[{index}]" for index in range(len(body.texts))]
    unvalidated = UnvalidatedEmbeddings(
        inputs=[
            ValueInput(TextPrompt(text, add_special_tokens=True), input_fields(name, name, name, others))
            for text, name in zip(body.texts, where, strict=True)
        ],
        field_path=NamedFields(_NAMES),
        model=body.model,
        dimensions=body.output_dimension,
        truncate_prompt_tokens=None if is_refused else num_kept,
        truncation_side=TruncationSide.LEFT if body.truncate == "START" else TruncationSide.RIGHT,
        priority=body.priority,
        retention=read_retention(body.retention),
    )
    return CohereEmbedRequest(unvalidated, body.texts, types)


def packed(vector: Vector, *, is_signed: bool) -> list[int]:
    """A bit for each number, 1 from 0 up, eight in an integer, the first one highest. Raises QuireError where their
    number is no multiple of eight."""
    if len(vector) % 8:
        message = f"has binary forms for multiples of 8 numbers only, and the vectors have {len(vector)}"
        raise invalid("embedding_types", message)
    bits = "".join(["1" if number >= 0 else "0" for number in vector])
    lowest = 128 if is_signed else 0
    return [byte - lowest for byte in int(bits, 2).to_bytes(len(vector) // 8, "big")]


_FORMS: Mapping[str, Callable[[Vector], Any]] = {
    "float": EncodingFormat.FLOAT.encode,
    "base64": EncodingFormat.BASE64.encode,
    "binary": lambda vector: packed(vector, is_signed=True),
    "ubinary": lambda vector: packed(vector, is_signed=False),
}


def embed_answer(answer_id: str, read: CohereEmbedRequest, embedded: InputValues) -> Json:
    """The body of the answer. Raises QuireError."""
    return {
        "id": answer_id,
        "response_type": "embeddings_by_type",
        "embeddings": {name: [_FORMS[name](vector) for vector in embedded.values] for name in read.types},
        "texts": read.texts,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": embedded.usage.prompt_tokens, "image_tokens": 0},
        },
    }


class CohereEmbedRoutes:
    """The handler; errors are in OpenAI's format, as in vLLM."""

    def __init__(self, calls: HttpCalls) -> None:
        self._calls = calls

    def routes(self) -> list[HttpRoute]:
        doc = HandlerDoc(CohereEmbedBody, CohereEmbedAnswer, error=ErrorAnswer)
        return [HttpRoute("/v2/embed", {"POST": self.embed}, OPENAI_ERRORS, {"POST": doc})]

    async def embed(self, exchange: HttpExchange) -> None:
        """Embeds texts: each becomes a vector."""
        call = self._calls.call(exchange, Operation.EMBEDDINGS)
        read = await self._calls.read(exchange, call, CohereEmbedBody, read_embed, may_have_name=False)
        embedded = await self._calls.embed(exchange, call, read.unvalidated)
        answer_id = f"embd-{exchange.request_id}"
        await self._calls.answers.respond_with_values(
            exchange,
            call,
            lambda: embed_answer(answer_id, read, embedded),
            num_values=len(read.types) * embedded.num_numbers,
            num_characters=sum(map(len, read.texts)),
        )
