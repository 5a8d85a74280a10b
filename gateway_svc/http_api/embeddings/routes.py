"""OpenAI's route /v1/embeddings, with vLLM's fields."""

import base64
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from gateway_svc.chats import ChatPrompt
from gateway_svc.embeddings import (
    MAX_INPUTS,
    EmbeddingInput,
    Normalization,
    Pooling,
    UnvalidatedEmbeddings,
    Vector,
    input_fields,
)
from gateway_svc.field_paths import Field, NamedFields
from gateway_svc.http_api.calls import HttpCalls, prompt_usage
from gateway_svc.http_api.embeddings.models import EmbeddingsAnswer, EmbeddingsBody
from gateway_svc.http_api.endpoint import HandlerDoc, HttpRoute
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai import chat_fields
from gateway_svc.http_api.openai.answer_models import ErrorAnswer
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from gateway_svc.http_api.openai.prompt_fields import read_prompts, read_retention
from gateway_svc.output import Usage
from gateway_svc.tracing import Operation
from gateway_svc.unvalidated_request import TokenPrompt
from gateway_svc.validated_request import TruncationSide

_NAMES: Mapping[str, str] = {**chat_fields.NAMES, Field.PROMPT: "input"}
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

    unvalidated: UnvalidatedEmbeddings
    encoding_format: EncodingFormat
    chat: ChatPrompt | None = None
    """The one input, before it is tokenized."""

    def with_tokens(self, token_ids: Sequence[int]) -> UnvalidatedEmbeddings:
        """The call for the tokens of its chat."""
        field_path = input_fields("messages", "messages", "messages")
        return replace(self.unvalidated, inputs=[EmbeddingInput(TokenPrompt(token_ids), field_path)])


def read_embeddings(body: EmbeddingsBody, _: str | None = None) -> EmbeddingsRequest:
    """The inputs and options of a body. Raises QuireError."""
    if None not in (body.normalize, body.use_activation) and body.normalize != body.use_activation:
        raise invalid("use_activation", "is another name of normalize, and must have its value")
    chat = _chat(body)
    prompts = []
    if chat is None:
        has_special = body.add_special_tokens is not False
        prompts = read_prompts("input", body.input, MAX_INPUTS, add_special_tokens=has_special)
    unvalidated = UnvalidatedEmbeddings(
        inputs=[EmbeddingInput(prompt, input_fields(name, name, name)) for prompt, name in prompts],
        field_path=NamedFields(_NAMES),
        model=body.model,
        dimensions=body.dimensions,
        pooling=Pooling.OF_MODEL if body.pooling is None else Pooling[body.pooling.upper()],
        normalization=Normalization.of(body.use_activation if body.normalize is None else body.normalize),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=TruncationSide(body.truncation_side or "right"),
        priority=body.priority,
        retention=read_retention(body.retention),
    )
    return EmbeddingsRequest(unvalidated, EncodingFormat(body.encoding_format or "float"), chat)


def _chat(body: EmbeddingsBody) -> ChatPrompt | None:
    if body.messages is None:
        return None
    if body.input is not None:
        raise invalid("messages", "must not be beside input")
    return ChatPrompt(
        messages=chat_fields.read_messages(body.messages, "messages"),
        template_variables=chat_fields.template_variables(body.chat_template_kwargs),
        prompt_end=chat_fields.prompt_end(bool(body.add_generation_prompt), body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
    )


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
        unvalidated, encoding_format = read.unvalidated, read.encoding_format
        if read.chat is not None:
            found = self._calls.find_model(exchange, call, unvalidated.model, unvalidated.field_path)
            unvalidated = read.with_tokens(await self._calls.encode(call, found, read.chat, unvalidated.field_path))
        embedded = await self._calls.embed(exchange, call, unvalidated)
        answer_id, created = f"embd-{exchange.request_id}", int(time.time())
        await self._calls.respond(
            exchange,
            call,
            lambda: answer_of(answer_id, created, embedded.vectors, encoding_format, embedded.model, embedded.usage),
            num_values=encoding_format.num_values(embedded.num_numbers),
        )
