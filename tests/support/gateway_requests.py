"""Requests to generate from both protocols, validated by the one validator."""

import json
from typing import Any

import pytest

from gateway_svc.field_paths import generation_field_path
from gateway_svc.grammar_checker import GrammarChecker
from gateway_svc.http_api.json_body import parse_body
from gateway_svc.http_api.openai.bodies import read_chat_completion, read_completion
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.http_api.openai.generation_body import CompletionBody
from gateway_svc.model_catalog import CatalogModel, ModelCatalog
from gateway_svc.rendering import Rendering
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.unvalidated_request import GenerationDefaults, ResponseMode, UnvalidatedRequest
from gateway_svc.validated_request import ModelInfo, ValidatedRequest
from gateway_svc.validation import Validator
from quire.inference.v1 import inference_pb2 as api
from svc_common.errors import QuireError, Reason
from tiny_model import CONTEXT_LENGTH, tiny_tokenizer

VOCAB_SIZE = tiny_tokenizer().get_vocab_size()
MODEL = ModelInfo("tiny", CONTEXT_LENGTH, VOCAB_SIZE)


def catalog(
    tokenizer: ModelTokenizer, defaults: GenerationDefaults | None = None, grammars: GrammarChecker | None = None
) -> ModelCatalog:
    """A catalog of the one model."""
    defaults = defaults or GenerationDefaults()
    validator = Validator(tokenizer, defaults, grammars=grammars)
    return ModelCatalog([CatalogModel("tiny", (), b"", tokenizer, defaults, validator, grammars)])


async def over_grpc(
    tokenizer: ModelTokenizer,
    response_mode: ResponseMode = ResponseMode.WHOLE,
    defaults: GenerationDefaults | None = None,
    grammars: GrammarChecker | None = None,
    **fields: Any,
) -> ValidatedRequest:
    """Validates a Generation from the wire."""
    sent = api.Generation(**fields).SerializeToString()
    unvalidated = UnvalidatedRequest.from_proto(api.Generation.FromString(sent), response_mode)
    model = catalog(tokenizer, defaults, grammars).find(unvalidated.model, generation_field_path)
    return await model.validator.generation(unvalidated, MODEL, generation_field_path, "own-id")


async def over_http(
    tokenizer: ModelTokenizer,
    request_id: str | None = None,
    defaults: GenerationDefaults | None = None,
    grammars: GrammarChecker | None = None,
    **fields: Any,
) -> ValidatedRequest:
    """Validates a body of /v1/chat/completions if it has messages, else of /v1/completions."""
    parsed = parse_body(json.dumps(fields).encode())
    if "messages" in fields:
        (asked,) = read_chat_completion(ChatBody.read(parsed), request_id).prompts
    else:
        (asked,) = read_completion(CompletionBody.read(parsed), request_id).prompts
    model = catalog(tokenizer, defaults, grammars).find(asked.unvalidated.model, asked.field_path)
    return await model.validator.generation(asked.unvalidated, MODEL, asked.field_path, "own-id")


def digest_of(request: ValidatedRequest, tokenizer: ModelTokenizer) -> bytes:
    """The digest of its body."""
    return request.to_proto(Rendering.of(request, tokenizer.vocabulary).to_proto()).body_digest


async def refused(resolving: Any) -> tuple[Reason, str | None]:
    """Reason and field of the error that validation raises."""
    with pytest.raises(QuireError) as error:
        await resolving
    return error.value.reason, error.value.field


def sampling(**fields: Any) -> dict[str, Any]:
    """Fields of Sampling, in a Generation."""
    return {"sampling": api.Sampling(**fields)}


def stopping(**fields: Any) -> dict[str, Any]:
    """Fields of Stopping, in a Generation."""
    return {"stopping": api.Stopping(**fields)}
