"""The OpenAPI document: valid, complete, and true of the answers."""

import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gateway_svc.http_api.anthropic.answers import MessageBuilder
from gateway_svc.http_api.anthropic.errors import ANTHROPIC_ERRORS
from gateway_svc.http_api.anthropic.models import MessagesBody
from gateway_svc.http_api.api_document import api_document
from gateway_svc.http_api.app import HttpApi, HttpOptions
from gateway_svc.http_api.body_model import BodyModel
from gateway_svc.http_api.calls import InputValues
from gateway_svc.http_api.docs_page import docs_page
from gateway_svc.http_api.embeddings.cohere_models import CohereEmbedBody
from gateway_svc.http_api.embeddings.cohere_routes import embed_answer as cohere_embed_answer
from gateway_svc.http_api.embeddings.cohere_routes import read_embed
from gateway_svc.http_api.embeddings.models import EmbeddingsBody
from gateway_svc.http_api.embeddings.routes import EncodingFormat, answer_of
from gateway_svc.http_api.endpoint import HttpRoute
from gateway_svc.http_api.errors import NO_ROUTE, HttpError
from gateway_svc.http_api.ollama.answers import OllamaBuilder, OllamaForm, embed_answer
from gateway_svc.http_api.ollama.errors import OLLAMA_ERRORS
from gateway_svc.http_api.ollama.models import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from gateway_svc.http_api.openai.answer_options import NO_OPTIONS, AnswerOptions
from gateway_svc.http_api.openai.answers import ResponseBuilder
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.http_api.openai.choice_formats import CallFormat, ChatFormat, CompletionFormat, Format
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from gateway_svc.http_api.openai.generation_body import CompletionBody
from gateway_svc.http_api.responses.models import ResponsesBody
from gateway_svc.http_api.scoring.models import RerankBody, ScoreBody
from gateway_svc.http_api.scoring.requests import read_rerank
from gateway_svc.http_api.scoring.routes import rerank_answer, score_answer
from gateway_svc.http_api.undefined_fields import UndefinedFields
from gateway_svc.output import Chunk, Finish, FinishReason, TokenLogprob, ToolCallDelta, Usage
from gateway_svc.prompt_output import PromptOutput
from gateway_svc.sampling_fields import SAMPLING_FIELDS
from gateway_svc.validated_request import Echo
from gateway_values import id_of, make_rendering, vocabulary_of
from quire.worker.v1 import worker_pb2 as worker_v1
from svc_common.errors import QuireError, Reason
from tiny_model import tiny_tokenizer

OFFICIAL_SCHEMA = Path(__file__).parents[3] / "support/openapi-3.1.schema.json"
VOCABULARY = vocabulary_of(tiny_tokenizer())
A = id_of(tiny_tokenizer(), "a")


def all_routes() -> list[HttpRoute]:
    """The routes of a gateway without keys. None is called."""
    manager, authenticator, hosts = (
        SimpleNamespace(metrics=None, catalog=None),
        SimpleNamespace(requires_credential=False),
        None,
    )
    api: Any = HttpApi
    options = HttpOptions(read_timeout=1.0, undefined_fields=UndefinedFields.WARN)
    routes: list[HttpRoute] = api(manager, authenticator, hosts, None, options, None).routes
    return routes


ROUTES = all_routes()
DOCUMENT = api_document(ROUTES, requires_credential=True)
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def conforms(name: str, value: Any) -> None:
    """Raises unless a value has the schema of this name."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    Draft202012Validator(schema).validate(value)


def test_the_document_is_openapi_3_1() -> None:
    official = json.loads(OFFICIAL_SCHEMA.read_text())
    assert [error.message for error in Draft202012Validator(official).iter_errors(DOCUMENT)] == []
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


def test_references_lead_somewhere_and_names_of_operations_are_unique() -> None:
    assert {name.removeprefix("#/components/schemas/") for name in references(DOCUMENT)} <= SCHEMAS.keys()
    operations = [operation for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert all(operation["description"] for operation in operations)


def test_every_route_is_there_with_its_parameters() -> None:
    assert len(DOCUMENT["paths"]) == len(ROUTES)
    for route in ROUTES:
        assert route.docs.keys() == route.handlers.keys(), route.path
        assert all(doc.error is not None for doc in route.docs.values()), route.path
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            in_path = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
            assert in_path == set(re.findall(r"{(\w+)}", path))
    assert "/v1/models/{model}" in DOCUMENT["paths"]


def bodies() -> list[type[BodyModel]]:
    given = [doc.body for route in ROUTES for doc in route.docs.values() if doc.body is not None]
    models = {model for one in given for model in (one if isinstance(one, tuple) else (one,))}
    return sorted(models, key=lambda model: model.__name__)


@pytest.mark.parametrize("model", bodies())
def test_every_known_field_is_described(model: type[BodyModel]) -> None:
    properties = SCHEMAS[model.__name__]["properties"]
    assert properties.keys() == model.known_fields()
    assert all(field["description"] for field in properties.values())
    if model in (
        CompletionBody,
        ChatBody,
        EmbeddingsBody,
        MessagesBody,
        OllamaChatBody,
        OllamaEmbedBody,
        OllamaEmbeddingsBody,
        OllamaGenerateBody,
        RerankBody,
        ResponsesBody,
        ScoreBody,
    ):
        assert properties["xtc_probability"] == {"enum": [0, None], "description": "Not served."}


@pytest.mark.parametrize("body", ["ChatBody", "CompletionBody"])
def test_a_value_that_the_models_files_may_set_has_no_default(body: str) -> None:
    properties = SCHEMAS[body]["properties"]
    for one in SAMPLING_FIELDS:
        assert (properties[one.name]["default"] is None) == one.may_be_configured, one.name
    assert "else 1." in properties["temperature"]["description"]


def test_what_an_operator_may_set_for_requests_without_a_field_is_described() -> None:
    tokens = SCHEMAS["ChatBody"]["properties"]["return_tokens_as_token_ids"]
    usage = SCHEMAS["StreamOptions"]["properties"]["include_usage"]
    length = SCHEMAS["OllamaOptions"]["properties"]["num_predict"]
    assert all("operator" in field["description"] for field in (tokens, usage, length))


def test_operations_have_the_headers_that_are_read() -> None:
    def headers(path: str) -> set[str]:
        operation = DOCUMENT["paths"][path]["post"]
        return {one["name"] for one in operation["parameters"] if one["in"] == "header"}

    deadline = {"x-request-timeout", "x-request-id", "traceparent"}
    for path in ("/v1/completions", "/v1/chat/completions", "/invocations"):
        assert headers(path) == {"Idempotency-Key", "Last-Event-ID", *deadline}
    for path in ("/v1/messages", "/v1/responses", "/api/chat", "/api/generate"):
        assert headers(path) == {"Idempotency-Key", *deadline}
    embeds = ("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v2/embed", "/api/embed")
    for path in ("/tokenize", "/detokenize", *embeds, "/api/embeddings", "/v1/messages/count_tokens", "/api/show"):
        assert headers(path) == deadline
        assert "x-request-durable" not in DOCUMENT["paths"][path]["post"]["responses"]["200"]["headers"]


def test_every_answer_has_the_headers_of_ids() -> None:
    answers = [one["responses"]["200"] for path in DOCUMENT["paths"].values() for one in path.values()]
    assert all({"x-request-id", "x-quire-request-id"} <= answer["headers"].keys() for answer in answers)


def test_operations_that_stream_have_both_kinds_of_answers() -> None:
    def kinds(path: str, method: str) -> set[str]:
        return set(DOCUMENT["paths"][path][method]["responses"]["200"]["content"])

    for path in ("/v1/completions", "/v1/chat/completions", "/invocations", "/v1/messages", "/v1/responses"):
        assert kinds(path, "post") == {"application/json", "text/event-stream"}
    assert kinds("/v1/responses/{response_id}", "get") == {"application/json", "text/event-stream"}
    assert kinds("/api/chat", "post") == kinds("/api/generate", "post") == {"application/json", "application/x-ndjson"}
    invocations = DOCUMENT["paths"]["/invocations"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names = ["ChatBody", "CompletionBody", "EmbeddingsBody", "ClassifyBody", "RerankBody", "ScoreBody"]
    assert [one["$ref"].rpartition("/")[2] for one in invocations["anyOf"]] == names


def test_bodies_that_are_accepted_have_the_schema() -> None:
    conforms("CompletionBody", {"prompt": [[1, 2], "a"], "n": 2, "stop": "a", "logit_bias": {"1": -1}, "user": "me"})
    conforms("ChatBody", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": None})


def test_credentials_are_required_or_optional() -> None:
    def security(document: dict[str, Any], path: str, method: str) -> Any:
        return document["paths"][path][method]["security"]

    optional = api_document(ROUTES, requires_credential=False)
    schemes: list[dict[str, list[str]]] = [{"bearer": []}, {"xApiKey": []}, {"apiKey": []}]
    assert security(DOCUMENT, "/v1/completions", "post") == schemes
    assert security(optional, "/v1/completions", "post") == [{}, *schemes]
    for path in ("/health", "/live", "/docs"):
        assert security(DOCUMENT, path, "get") == security(optional, path, "get") == []


CALLS = [ToolCallDelta(0, "{}", "call_0", "f")]


def logprob(token_id: int, text_offset: int) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, -0.5, ((A, -0.5),), text_offset)]


CHUNKS = [
    Chunk(0, 0, "he", [A], logprob(A, 0)),
    Chunk(0, 1, "", [A], logprob(A, 2), reasoning="so"),
    Chunk(0, 2, "", [A], logprob(A, 2), tool_calls=CALLS, ended_calls=(0,)),
    Chunk(0, 3, "llo", [A], logprob(A, 2)),
    Chunk(0, 4, "", [2], logprob(2, 5), finish=Finish(FinishReason.STOP, 2)),
]


@pytest.mark.parametrize("echo", Echo)
@pytest.mark.parametrize("options", [NO_OPTIONS, AnswerOptions(True, True, True, "default")], ids=["plain", "all"])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize(
    ("form", "whole_name", "event_name"),
    [
        (CompletionFormat(), "CompletionAnswer", "CompletionEvent"),
        (ChatFormat(), "ChatAnswer", "ChatEvent"),
        (ChatFormat(CallFormat(is_legacy=True)), "ChatAnswer", "ChatEvent"),
    ],
    ids=["completion", "chat", "legacy chat"],
)
def test_answers_have_their_schemas(
    form: Format, whole_name: str, event_name: str, logprobs: int | None, options: AnswerOptions, echo: Echo
) -> None:
    rendering = make_rendering(
        VOCABULARY, logprobs=logprobs, prompt_logprobs=logprobs, echo=echo, prompt_token_ids=[A, A]
    )
    scored = [] if logprobs is None else [worker_v1.TokenLogprobs(logprob=-1.0)]
    prompt = PromptOutput.of(rendering, scored, VOCABULARY)

    def builder() -> ResponseBuilder:
        return ResponseBuilder(
            form,
            [rendering],
            VOCABULARY,
            created=12,
            prompt_of=lambda _: prompt,
            options=options,
            prompts=[[A, A]],
            fingerprint="fp_x",
        )

    conforms(whole_name, builder().whole([(0, chunk) for chunk in CHUNKS], Usage(5, 3, 4)))
    stream = builder()
    events = b"".join([*(stream.event(0, chunk) for chunk in CHUNKS), stream.last_events(Usage(5, 3, 4))])
    *data, done = [event.removeprefix("data: ") for event in events.decode().split("\n\n") if event]
    assert (len(data), done) == (len(CHUNKS) + 1 + (form.opening is not None), "[DONE]")
    for event in data:
        conforms(event_name, json.loads(event))


def test_messages_have_their_schemas() -> None:
    def builder() -> MessageBuilder:
        return MessageBuilder(make_rendering(VOCABULARY), lambda: Usage(5, 3, 4))

    conforms("MessageAnswer", builder().whole([(0, chunk) for chunk in CHUNKS]))
    stream = builder()
    events = b"".join([*(stream.event(0, chunk) for chunk in CHUNKS), stream.last_events()]).decode()
    for line in events.splitlines():
        if line.startswith("data: "):
            conforms("MessageEvent", json.loads(line.removeprefix("data: ")))


@pytest.mark.parametrize(
    ("form", "name"), [(OllamaForm.CHAT, "OllamaChatAnswer"), (OllamaForm.GENERATE, "OllamaGenerateAnswer")]
)
def test_lines_have_their_schemas(form: OllamaForm, name: str) -> None:
    def builder() -> OllamaBuilder:
        return OllamaBuilder(form, make_rendering(VOCABULARY), VOCABULARY, lambda: Usage(5, 3, 4), 0)

    conforms(name, form.loaded("m"))
    conforms(name, builder().whole(CHUNKS))
    stream = builder()
    for line in b"".join([*(stream.lines(chunk) for chunk in CHUNKS), stream.last_lines()]).splitlines():
        conforms(name, json.loads(line))


def test_embeddings_have_their_schema() -> None:
    for encoding_format in EncodingFormat:
        conforms("EmbeddingsAnswer", answer_of("e", 1, [array("f", (0.5, -1))], encoding_format, "m", Usage(2)))
    conforms("EmbeddingsBody", {"input": ["a", [5]], "dimensions": 2, "encoding_format": "base64", "user": "me"})


def test_embeddings_of_cohere_have_their_schemas() -> None:
    embedded = InputValues([array("f", (0.5,) * 8)], "m", Usage(2))
    body: dict[str, Any] = {"texts": ["a"], "embedding_types": ["float", "base64", "binary", "ubinary"]}
    conforms("CohereEmbedBody", body)
    read = read_embed(CohereEmbedBody.of(body))
    conforms("CohereEmbedAnswer", cohere_embed_answer("e", read, embedded))


def test_embeddings_of_ollama_have_their_schemas() -> None:
    embedded = InputValues([array("f", (0.5, -1))], "m", Usage(2))
    conforms("OllamaEmbedAnswer", embed_answer(embedded, 0))
    conforms("OllamaEmbedAnswer", {"model": "m", "embeddings": []})
    conforms("OllamaEmbeddingsAnswer", {"embedding": [0.5, -1.0]})
    fields = {"options": {"num_ctx": 5, "seed": 1}, "truncate": False, "keep_alive": "5m"}
    conforms("OllamaEmbedBody", {"input": ["a", "b"], "dimensions": 2, **fields})
    conforms("OllamaEmbedBody", {"input": "a"})
    conforms("OllamaEmbeddingsBody", {"prompt": "a", **fields})


def test_scores_have_their_schemas() -> None:
    conforms("ScoreAnswer", score_answer("score-1", 12, [0.5, -1.0], "m", Usage(5)))
    document: dict[str, Any] = {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "user": "me"}
    for fields in (document, document | {"return_documents": False}, document | {"documents": "b"}):
        conforms("RerankBody", fields)
        scores = [0.5] * (2 if fields["documents"] != "b" else 1)
        conforms("RerankAnswer", rerank_answer("r", read_rerank(RerankBody.of(fields)), scores, "m", Usage(5)))
    texts = {"query": "a", "texts": ["b", "c"], "return_text": True}
    conforms("RerankBody", texts)
    conforms("RankedTexts", rerank_answer("r", read_rerank(RerankBody.of(texts)), [0.5, 0.1], "m", Usage(5)))
    conforms("ScoreBody", {"text_1": {"text": "a"}, "text_2": ["b"], "truncation_side": "left", "use_activation": True})


def test_errors_have_their_schema() -> None:
    for error in (NO_ROUTE, HttpError.of(QuireError(Reason.INVALID_FIELD, "is bad", field="n"))):
        conforms("ErrorAnswer", OPENAI_ERRORS.body(error))
        conforms("AnthropicError", ANTHROPIC_ERRORS.body(error))
        conforms("OllamaError", OLLAMA_ERRORS.body(error))
    threads = QuireError(Reason.FEATURE_UNSUPPORTED, "is not served", field="thread")
    conforms("AnthropicError", ANTHROPIC_ERRORS.body(HttpError.of(threads)))


def test_the_page_shows_every_object_and_loads_nothing() -> None:
    page = docs_page(DOCUMENT).decode()
    for name in SCHEMAS:
        assert f'<h3 id="{name}">' in page
    assert "<code>repetition_penalty</code>" in page
    for tag in ("<script", "<link", "<img", "src=", "http://", "https://", "url("):
        assert tag not in page


def test_texts_on_the_page_are_escaped() -> None:
    document = {**DOCUMENT, "info": {"title": "<b>", "description": "</p><script>", "version": "1"}}
    page = docs_page(document).decode()
    assert "&lt;b&gt;" in page
    assert "<script>" not in page
