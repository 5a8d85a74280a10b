"""Embeddings over the wire, with a scripted scheduler, for a model as BERT."""

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from embedding_calls import LIMITS, TEXTS, VECTORS, asking, vector_of
from encoder_model import CONTEXT_LENGTH, ids
from gateway_calls import refused
from gateway_harness import Harness, reason_of, running_gateway
from official_client import official_client
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire_client import AsyncClient, Client
from scripted_scheduler import ScriptedSession, embed_with, value_end

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_gateway(encoder_directory: Path) -> AsyncIterator[Harness]:
    """A gateway for tests that change no state of it."""
    async with running_gateway(encoder_directory, **LIMITS) as harness:
        yield harness


@pytest.fixture
def shared(module_gateway: Harness) -> Harness:
    """The module's gateway. Its scheduler computes all vectors."""
    module_gateway.scheduler.reset()
    module_gateway.scheduler.script = embed_with(vector_of)
    return module_gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_template(encoder_directory: Path) -> AsyncIterator[Harness]:
    """A gateway whose model has a chat template."""
    async with running_gateway(encoder_directory, **LIMITS, chat_template=TEMPLATE) as harness:
        harness.scheduler.script = embed_with(vector_of)
        yield harness


async def test_openais_client_gets_the_vectors(shared: Harness) -> None:
    async with official_client(shared) as client:
        formats: list[dict[str, Any]] = [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}]
        for encoding_format in formats:
            answer = await client.embeddings.create(model="tiny", input=TEXTS, **encoding_format)
            assert (answer.object, answer.model) == ("list", "tiny")
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (9, 9)
            assert [(one.object, one.index) for one in answer.data] == [("embedding", 0), ("embedding", 1)]
            if encoding_format.get("encoding_format") == "base64":
                found = [list(struct.unpack("<4f", base64.b64decode(str(one.embedding)))) for one in answer.data]
            else:
                found = [list(one.embedding) for one in answer.data]
            assert found == VECTORS
        (one,) = (await client.embeddings.create(model="tiny", input="hello world", dimensions=2)).data
        assert list(one.embedding) == VECTORS[0][:2]
        tokens = await client.embeddings.create(model="tiny", input=[[5, 6], [7]])
        assert [list(one.embedding) for one in tokens.data] == [vector_of([5, 6]), vector_of([7])]


async def test_coheres_route_has_the_same_vectors(shared: Harness) -> None:
    answer = (await shared.http.post("/v2/embed", json={"model": "tiny", "texts": TEXTS})).json()
    assert (answer["embeddings"], answer["texts"]) == ({"float": VECTORS}, TEXTS)
    assert answer["meta"]["billed_units"]["input_tokens"] == 9
    long = {"texts": ["a b c d " * 5], "truncate": "START"}
    answer = (await shared.http.post("/v2/embed", json=long)).json()
    assert answer["meta"]["billed_units"]["input_tokens"] == CONTEXT_LENGTH
    refused = await shared.http.post("/v2/embed", json={"texts": ["a"], "output_dimension": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "output_dimension")


CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
TEMPLATE = (
    "{% for one in messages %}{{ one.content }} {% if not loop.last or not continue_final_message %}b {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ end or 'c' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "hello b world b"),
        ({"add_generation_prompt": True}, "hello b world b c"),
        ({"add_generation_prompt": True, "chat_template_kwargs": {"end": "d"}}, "hello b world b d"),
        ({"continue_final_message": True}, "hello b world"),
        ({"add_special_tokens": True}, "[CLS] hello b world b [SEP]"),
        ({"truncate_prompt_tokens": 2}, "hello b"),
        ({"dimensions": 2}, "hello b world b"),
    ],
)
async def test_the_text_of_a_chat_is_embedded(
    encoder_directory: Path, fields: dict[str, Any], prompt: str, with_template: Harness
) -> None:
    answer = (await with_template.http.post("/v1/embeddings", json={"messages": CHAT, **fields})).json()
    assert answer["usage"]["prompt_tokens"] == len(ids(prompt))
    (one,) = answer["data"]
    assert one["embedding"] == vector_of(ids(prompt))[: fields.get("dimensions")]


async def test_a_chat_that_cannot_be_embedded_is_refused_by_name(shared: Harness, with_template: Harness) -> None:
    error = (await shared.http.post("/v1/embeddings", json={"messages": CHAT})).json()["error"]
    assert (error["code"], error["param"]) == ("feature_unsupported", "messages")
    long = [{"role": "user", "content": "a " * (CONTEXT_LENGTH + 1)}]
    error = (await with_template.http.post("/v1/embeddings", json={"messages": long})).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_the_contract_has_them(shared: Harness) -> None:
    shared.scheduler.script = embed_with(vector_of, cached_tokens=2)
    call = shared.stub.Embed(asking(model="tiny"))
    answer = await call
    assert answer.model == "tiny"
    assert [list(one.numbers) for one in answer.embeddings] == VECTORS
    assert answer.usage == api.Usage(prompt_tokens=9, cached_tokens=4)
    assert dict(await call.initial_metadata())["x-request-id"]


async def test_each_input_is_a_submission_of_its_own(shared: Harness) -> None:
    fields = {"dimensions": 3, "pooling": "last", "normalize": True, "priority": 2, "retention": "none"}
    answer = await shared.http.post(
        "/v1/embeddings", json={"input": TEXTS, **fields}, headers={"idempotency-key": "mine"}
    )
    first, second = shared.scheduler.all("submit")
    assert first.key != second.key
    assert list(first.prompt_token_ids) == ids("[CLS] hello world [SEP]")
    for submit in (first, second):
        assert (submit.n, submit.max_tokens, submit.priority, submit.detachable) == (1, 0, 2, False)
        assert submit.retention.is_unrecorded
        assert (submit.tenant, submit.model, len(submit.cache_salt)) == ("default", "tiny", 32)
        embedding = submit.result.embedding
        assert (embedding.pooling, embedding.num_dimensions, embedding.normalization) == (3, 3, 2)
        assert submit.render_options.request_id == answer.headers["x-request-id"] != "mine"


async def test_both_python_clients_embed(shared: Harness) -> None:
    address = f"127.0.0.1:{shared.gateway.grpc_port}"
    async with AsyncClient(address) as client:
        found = await client.embed(TEXTS, pooling="cls", normalize=False, truncate_prompt_tokens=-1)
        assert [list(vector) for vector in found.vectors] == VECTORS
        assert (found.model, found.usage.prompt_tokens) == ("tiny", 9)

    def blocking() -> None:
        with Client(address) as client:
            assert list(client.embed([5, 6], dimensions=2).vector) == vector_of([5, 6])[:2]

    await asyncio.to_thread(blocking)
    embedding = shared.scheduler.all("submit")[0].result.embedding
    assert (embedding.pooling, embedding.normalization) == (2, 1)


async def test_a_long_text_is_refused_or_cut(shared: Harness) -> None:
    body: dict[str, Any] = {"input": ["a", "a b c d " * 5]}
    answer = await shared.http.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input[1]")
    assert not shared.scheduler.all("submit")
    answer = await shared.http.post("/v1/embeddings", json={**body, "truncate_prompt_tokens": -1})
    assert answer.json()["usage"]["prompt_tokens"] == 3 + CONTEXT_LENGTH
    long = list(shared.scheduler.all("submit")[1].prompt_token_ids)
    assert (long[:2], long[-1]) == (ids("[CLS] a"), ids("[SEP]")[0])


async def test_more_dimensions_than_the_model_has_are_refused(shared: Harness) -> None:
    answer = await shared.http.post("/v1/embeddings", json={"input": "a", "dimensions": 5})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dimensions")
    assert reason_of(await refused(shared.stub.Embed(asking(dimensions=5)))) == ("INVALID_FIELD", "dimensions")


async def test_vectors_of_two_versions_of_the_model_are_not_answered_together(shared: Harness) -> None:
    versions = iter([b"old", b"new", b"new", b"new"])

    def script(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        session.tokens(submit.key, (), 0, end=value_end(1.0, 2.0), model_fingerprint=next(versions))

    shared.scheduler.script = script
    answer = await shared.http.post("/v1/embeddings", json={"input": TEXTS})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "capacity_exhausted")
    assert "retry-after" in answer.headers
    assert (await shared.http.post("/v1/embeddings", json={"input": TEXTS})).status_code == 200


async def test_a_model_that_embeds_nothing_is_said_to(shared: Harness) -> None:
    reason = scheduler_v1.FAILURE_REASON_UNSUPPORTED_RESULT
    message = "computes no embedding"
    shared.scheduler.script = lambda session, submit: session.fail(submit.key, reason, message)
    error = (await shared.http.post("/v1/embeddings", json={"input": TEXTS})).json()["error"]
    assert (error["code"], error["message"], error["param"]) == ("feature_unsupported", f"model: {message}", "model")
    assert reason_of(await refused(shared.stub.Embed(asking()))) == ("FEATURE_UNSUPPORTED", "model")


async def test_a_refusal_of_the_scheduler_names_the_input(shared: Harness) -> None:
    def script(session: Any, submit: scheduler_v1.Submit) -> None:
        if submit.prompt_token_ids[1] == ids("a")[0]:
            session.fail(submit.key, scheduler_v1.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED, "one step")
        else:
            session.accept(submit.key)

    shared.scheduler.script = script
    error = (await shared.http.post("/v1/embeddings", json={"input": TEXTS})).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    reason = ("CONTEXT_LENGTH_EXCEEDED", "inputs[1]")
    assert reason_of(await refused(shared.stub.Embed(asking()))) == reason


async def test_a_request_with_a_value_cannot_be_resumed(shared: Harness) -> None:
    answer = await shared.http.post("/v1/embeddings", json={"input": "a"})
    (submit,) = shared.scheduler.all("submit")
    tokens = scheduler_v1.Tokens(end=value_end(0.5))
    shared.scheduler.attach_script = lambda session, attach: session.attached(submit, tokens)
    request = api.ResumeRequest(request_id=answer.headers["x-request-id"])
    assert reason_of(await refused(shared.stub.Resume(request))) == ("REQUEST_UNKNOWN", "")


async def test_long_answers_are_written_in_threads(shared: Harness) -> None:
    shared.scheduler.script = embed_with(lambda token_ids: [float(len(token_ids))] * 5_000)
    answer = await shared.http.post("/v1/embeddings", json={"input": ["a"] * 2})
    assert [one["embedding"] for one in answer.json()["data"]] == [[3.0] * 5_000] * 2


async def test_metrics_count_calls_and_tokens(shared: Harness) -> None:
    calls = 'quire_gateway_requests_total{code="200",method="/v1/embeddings",model="tiny",protocol="http"}'
    prompts = 'quire_gateway_prompt_tokens_total{model="tiny"}'
    before = [await shared.metric(line) for line in (calls, prompts)]
    await shared.http.post("/v1/embeddings", json={"input": TEXTS, "user": "me"})
    assert [await shared.metric(line) for line in (calls, prompts)] == [before[0] + 1, before[1] + 9]
    assert await shared.metric('quire_gateway_requests_in_flight{model="tiny"}') == 0
