"""Any JSON object is read as a body of each protocol, or refused with an error that names a field."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.field_paths import Field, FieldPath
from gateway_svc.http_api.anthropic.models import MessagesBody
from gateway_svc.http_api.anthropic.requests import read_count, read_messages
from gateway_svc.http_api.classifying.models import ClassifyBody
from gateway_svc.http_api.classifying.routes import read_classify
from gateway_svc.http_api.embeddings.models import EmbeddingsBody
from gateway_svc.http_api.embeddings.routes import read_embeddings
from gateway_svc.http_api.json_body import parse_body
from gateway_svc.http_api.ollama.models import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from gateway_svc.http_api.ollama.requests import read_chat, read_embed, read_embeddings_prompt, read_generate
from gateway_svc.http_api.scoring.models import RerankBody, ScoreBody
from gateway_svc.http_api.scoring.requests import read_rerank, read_score
from gateway_svc.http_api.tokenizing.models import TokenizeBody
from gateway_svc.http_api.tokenizing.routes import read_tokenize
from svc_common.errors import QuireError, Reason

NAMES = [
    "messages", "role", "content", "type", "text", "id", "name", "input", "tool_use_id", "thinking", "tool_calls",
    "function", "arguments", "images", "tools", "input_schema", "tool_choice", "system", "max_tokens",
    "stop_sequences", "stream", "options", "num_predict", "stop", "format", "think", "prompt", "raw", "tool_name",
    "tool_call_id", "temperature", "top_k", "output_config", "effort", "schema", "budget_tokens", "model",
    "add_special_tokens", "pooling", "encoding_format", "normalize", "dimensions", "query", "documents", "text_1",
    "text_2", "top_n",
]  # fmt: skip
WORDS = [
    "user", "assistant", "system", "tool", "text", "tool_use", "tool_result", "thinking", "image", "auto", "any",
    "enabled", "adaptive", "disabled", "json", "json_schema", "function", "low", "a", "\ud800",
]  # fmt: skip

leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.just(2**70) | st.just(0.5) | st.sampled_from(WORDS)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
# Bodies that are mostly right reach further.
texts = st.text(max_size=3) | values
blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS)},
    optional={
        "text": texts, "id": texts, "name": texts, "input": values, "tool_use_id": texts, "content": texts,
        "thinking": texts,
    },
)  # fmt: skip
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(WORDS), "content": texts | st.lists(blocks, max_size=3)},
    optional={"tool_calls": values, "thinking": texts, "tool_name": texts},
)
several = texts | st.lists(texts | st.fixed_dictionaries({"text": texts}), max_size=3)
bodies = (
    st.fixed_dictionaries(
        {}, optional={"messages": st.lists(messages, max_size=4), "max_tokens": st.just(5), "prompt": texts}
    )
    | st.fixed_dictionaries({}, optional={"input": several, "model": texts})
    | st.fixed_dictionaries({"documents": several}, optional={"query": texts, "queries": several, "top_n": values})
)


MAX_EXAMPLES = 10  # of each reader: 1,500 found nothing


@pytest.mark.parametrize(
    "read",
    [
        lambda body: read_messages(MessagesBody.read(body), None).prompt.field_path,
        lambda body: read_count(MessagesBody.read(body), None).field_path,
        lambda body: read_chat(OllamaChatBody.read(body), None).prompt.field_path,
        lambda body: read_generate(OllamaGenerateBody.read(body), None).prompt.field_path,
        lambda body: read_tokenize(TokenizeBody.read(body)).field_path,
        lambda body: read_embeddings(EmbeddingsBody.read(body)).inputs.unvalidated.field_path,
        lambda body: read_classify(ClassifyBody.read(body)).unvalidated.field_path,
        lambda body: read_embed(OllamaEmbedBody.read(body)).field_path,
        lambda body: read_embeddings_prompt(OllamaEmbeddingsBody.read(body)).field_path,
        lambda body: read_score(ScoreBody.read(body)).field_path,
        lambda body: read_rerank(RerankBody.read(body)).unvalidated.field_path,
    ],
    ids=[
        "messages",
        "count_tokens",
        "chat",
        "generate",
        "tokenize",
        "embeddings",
        "classify",
        "embed",
        "prompt",
        "score",
        "rerank",
    ],
)
@settings(max_examples=MAX_EXAMPLES)
@given(usual=bodies, other=st.dictionaries(st.sampled_from(NAMES), values, max_size=3))
def test_any_object_is_read_or_refused(
    read: Callable[[Any], FieldPath], usual: dict[str, Any], other: dict[str, Any]
) -> None:
    body = parse_body(json.dumps(other | usual).encode())
    refusal = None
    try:
        field_path = read(body)
    except QuireError as error:
        refusal = error
    if refusal is None:
        assert all(field_path(which) and field_path(which, 1) for which in Field)
    else:
        assert refusal.reason in (Reason.INVALID_FIELD, Reason.FEATURE_UNSUPPORTED)
        assert refusal.field
