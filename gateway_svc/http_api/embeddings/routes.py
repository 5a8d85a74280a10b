"""OpenAI's route /v1/embeddings, with vLLM's fields."""

import base64
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gateway_svc.embeddings import Normalization, Pooling, UnvalidatedEmbeddings
from gateway_svc.http_api.calls import HttpCalls, prompt_usage
from gateway_svc.http_api.embeddings.inputs import InputsRequest, read_chat, read_options
from gateway_svc.http_api.embeddings.models import EmbeddingsAnswer, EmbeddingsBody
from gateway_svc.http_api.endpoint import HandlerDoc, HttpRoute
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai.answer_models import ErrorAnswer
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from gateway_svc.output import Usage
from gateway_svc.tracing import Operation
from gateway_svc.value_inputs import Vector

_NUMBERS_OF_BASE64 = 16  # numbers in base64 that take as long to write as one of JSON


class EncodingFormat(Enum):
    """How an answer has vectors."""

    FLOAT = "float"
    BASE64 = "base64"

    def encode(self, vector: Vector) -> list[float] | str:
        """A vector as a value of JSON."""
        if self is EncodingFormat.FLOAT:
            return vector.tolist()
        if sys.byteorder == "big":
            vector = vector[:]
            vector.byteswap()
        return base64.b64encode(vector).decode()

    def num_values(self, num_numbers: int) -> int:
        """How long so many numbers of vectors take to write, in numbers of JSON."""
        return num_numbers if self is EncodingFormat.FLOAT else num_numbers // _NUMBERS_OF_BASE64


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """What is to be embedded, and how the answer has it."""

    inputs: InputsRequest[UnvalidatedEmbeddings]
    encoding_format: EncodingFormat


def read_embeddings(body: EmbeddingsBody, _: str | None = None) -> EmbeddingsRequest:
    """The inputs and options of a body. Raises QuireError."""
    if None not in (body.normalize, body.use_activation) and body.normalize != body.use_activation:
        raise invalid("use_activation", "is another name of normalize, and must have its value")
    unvalidated = UnvalidatedEmbeddings(
        **read_options(body),
        dimensions=body.dimensions,
        pooling=Pooling.OF_MODEL if body.pooling is None else Pooling[body.pooling.upper()],
        normalization=Normalization.of(body.use_activation if body.normalize is None else body.normalize),
    )
    inputs = InputsRequest(unvalidated, read_chat(body))
    return EmbeddingsRequest(inputs, EncodingFormat(body.encoding_format or "float"))


def answer_of(
    answer_id: str, created: int, vectors: Sequence[Vector], encoding_format: EncodingFormat, model: str, usage: Usage
) -> dict[str, Any]:
    """The body of the answer."""
    return {
        "id": answer_id,
        "created": created,
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encoding_format.encode(vector)}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": prompt_usage(usage),
    }


class EmbeddingsRoutes:
    """The handler; errors are in OpenAI's format."""

    def __init__(self, calls: HttpCalls) -> None:
        self._calls = calls

    def routes(self) -> list[HttpRoute]:
        doc = HandlerDoc(EmbeddingsBody, EmbeddingsAnswer, error=ErrorAnswer)
        return [HttpRoute("/v1/embeddings", {"POST": self.embeddings}, OPENAI_ERRORS, {"POST": doc})]

    async def embeddings(self, exchange: HttpExchange) -> None:
        """Embeds inputs, or a chat: each becomes a vector."""
        call = self._calls.call(exchange, Operation.EMBEDDINGS)
        # These requests have no names: nothing of them is kept for a repeated call.
        read = await self._calls.read(exchange, call, EmbeddingsBody, read_embeddings, may_have_name=False)
        encoding_format = read.encoding_format
        embedded = await self._calls.embed(exchange, call, await read.inputs.tokenized(self._calls, exchange, call))
        answer_id, created = f"embd-{exchange.request_id}", int(time.time())
        await self._calls.answers.respond_with_values(
            exchange,
            call,
            lambda: answer_of(answer_id, created, embedded.values, encoding_format, embedded.model, embedded.usage),
            num_values=encoding_format.num_values(embedded.num_numbers),
        )
