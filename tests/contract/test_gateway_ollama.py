"""Ollama's API over the wire, with a scripted scheduler: a model with reasoning and tools, and one as BERT."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from answers_with_calls import ANSWERS, ARGUMENTS, make_family_directory
from embedding_calls import LIMITS, TEXTS, VECTORS, vector_of
from encoder_model import ids
from gateway_harness import Harness, running_gateway
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scripted_scheduler import answer_with, embed_with
from tool_families import tool

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = 0
CONTEXT_LENGTH = 2_000
TOOLS = [tool("get_weather", city={"type": "string"})]
ANSWER = ANSWERS["reasoning, text and call"]
USER = {"role": "user", "content": "Weather?"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hermes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A ready gateway for a model with tools."""
    directory = make_family_directory(tmp_path_factory.mktemp("models") / "hermes", "hermes")
    async with running_gateway(directory, CONTEXT_LENGTH) as harness:
        yield harness


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bert(encoder_directory: Path) -> AsyncIterator[Harness]:
    """A ready gateway for a model that embeds."""
    async with running_gateway(encoder_directory, **LIMITS) as harness:
        yield harness


@pytest.fixture
def encoder(bert: Harness) -> Harness:
    """A gateway whose scheduler computes all vectors."""
    bert.scheduler.reset()
    bert.scheduler.script = embed_with(vector_of)
    return bert


@pytest.fixture
def quire(hermes: Harness) -> Harness:
    hermes.scheduler.reset()
    return hermes


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny:latest", "messages": [USER], "tools": TOOLS, **fields}


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain"])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show"])
async def test_only_a_web_page_must_say_that_its_body_is_json(
    path: str, content_type: str | None, quire: Harness
) -> None:
    quire.scheduler.script = answer_with(ANSWER.token_ids, stop_token_id=EOS)
    headers = {} if content_type is None else {"content-type": content_type}
    content = json.dumps({"model": "tiny", "messages": [USER]} if path == "/api/chat" else {"model": "tiny"})
    assert (await quire.http.post(path, content=content, headers=headers)).status_code == 200
    of_a_page = await quire.http.post(path, content=content, headers=headers | {"origin": "null"})
    assert (of_a_page.status_code, of_a_page.json()) == (415, {"error": "Content-Type must be application/json"})


async def test_the_command_ollama_finds_that_the_server_runs_and_reads_what_is_not_served(quire: Harness) -> None:
    assert (await quire.http.head("/")).status_code == 200
    assert (await quire.http.get("/")).text == "Quire is running"
    pulled = await quire.http.post("/api/pull", json={"model": "tiny"})
    assert (pulled.status_code, pulled.json()) == (404, {"error": "there is nothing at this address"})


async def test_a_chat_whole_and_streamed(quire: Harness) -> None:
    quire.scheduler.script = answer_with(ANSWER.token_ids, stop_token_id=EOS)
    whole = (await quire.http.post("/api/chat", json=body(stream=False))).json()
    message = whole["message"]
    assert (message["content"], message["thinking"]) == (ANSWER.text, ANSWER.reasoning)
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("get_weather", json.loads(ARGUMENTS))
    assert (whole["done"], whole["done_reason"], whole["model"]) == (True, "stop", "tiny")
    assert whole["eval_count"] == len(ANSWER.token_ids) + 1

    response = await quire.http.post("/api/chat", json=body())
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line["message"]["content"] for line in lines) == ANSWER.text
    assert "".join(line["message"].get("thinking", "") for line in lines) == ANSWER.reasoning
    (streamed,) = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert streamed["function"] == call["function"]
    assert lines[-1]["eval_count"] == whole["eval_count"]


async def test_a_generation(quire: Harness) -> None:
    text = ANSWERS["text"]
    quire.scheduler.script = answer_with(text.token_ids, stop_token_id=EOS)
    fields = {"model": "tiny", "prompt": "Weather?", "options": {"num_predict": 50, "seed": 4, "top_k": 3}}
    lines = [json.loads(line) for line in (await quire.http.post("/api/generate", json=fields)).text.splitlines()]
    assert "".join(line["response"] for line in lines) == text.text
    (submit,) = quire.scheduler.all("submit")
    assert (submit.max_tokens, submit.sampling.seed, submit.sampling.top_k) == (50, 4, 3)
    raw = (await quire.http.post("/api/generate", json=fields | {"raw": True, "stream": False})).json()
    assert raw["response"] == text.text
    assert raw["prompt_eval_count"] < lines[-1]["prompt_eval_count"]
    loaded = (await quire.http.post("/api/generate", json={"model": "tiny"})).json()
    assert (loaded["done_reason"], len(quire.scheduler.all("submit"))) == ("load", 2)


async def test_log_probabilities(quire: Harness) -> None:
    quire.scheduler.script = answer_with(ANSWERS["text"].token_ids, stop_token_id=EOS)
    fields = {"prompt": "Weather?", "logprobs": True, "top_logprobs": 2}
    whole = (await quire.http.post("/api/generate", json=fields | {"stream": False})).json()
    response = await quire.http.post("/api/generate", json=fields)
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [one for line in lines for one in line.get("logprobs", ())] == whole["logprobs"]
    *of_text, _ = whole["logprobs"]  # the last one is that of the stop token
    assert "".join(one["token"] for one in of_text) == ANSWERS["text"].text
    assert {len(one["top_logprobs"]) for one in whole["logprobs"]} == {2}
    too_many = await quire.http.post("/api/generate", json=fields | {"top_logprobs": 21})
    assert (too_many.status_code, "top_logprobs" in too_many.json()["error"]) == (400, True)


async def test_models(quire: Harness) -> None:
    (model,) = (await quire.http.get("/api/tags")).json()["models"]
    assert (model["name"], model["model"]) == ("tiny", "tiny")
    (loaded,) = (await quire.http.get("/api/ps")).json()["models"]
    assert (loaded["name"], loaded["context_length"]) == ("tiny", CONTEXT_LENGTH)
    shown = (await quire.http.post("/api/show", json={"model": "tiny:latest"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["quire.context_length"] == CONTEXT_LENGTH
    assert "messages" in shown["template"]
    assert (await quire.http.get("/api/version")).json() == (await quire.http.get("/version")).json()


async def test_errors_have_the_protocols_form(quire: Harness) -> None:
    for path, changes, status, message in (
        ("/api/chat", {"options": {"temperature": 3}}, 400, "options.temperature: must be between 0 and 2"),
        ("/api/chat", {"options": {"repeat_penalty": 0}}, 400, "options.repeat_penalty: must be above 0"),
        ("/api/chat", {"messages": [{**USER, "images": ["a"]}]}, 400, "messages[0].images: is not served"),
        ("/api/chat", {"model": "llama3:latest"}, 404, "model: no such model"),
        ("/api/show", {"model": "llama3"}, 404, "model: no such model"),
    ):
        response = await quire.http.post(path, json=body(**changes))
        assert response.status_code == status
        (text,) = response.json().values()
        assert text.startswith(message)


async def test_texts_are_embedded(encoder: Harness) -> None:
    fields = {"model": "tiny:latest", "keep_alive": "5m", "options": {"num_ctx": 4, "temperature": 0}}
    headers = {"idempotency-key": "mine"}
    answer = await encoder.http.post("/api/embed", json={**fields, "input": TEXTS}, headers=headers)
    body = answer.json()
    assert (body["model"], body["embeddings"], body["prompt_eval_count"]) == ("tiny", VECTORS, 9)
    assert (body["load_duration"], body["total_duration"] > 0) == (0, True)
    for submit in encoder.scheduler.all("submit"):
        assert submit.result.embedding.normalization == worker_v1.NORMALIZATION_L2
        assert submit.render_options.request_id == answer.headers["x-request-id"] != "mine"
    one = await encoder.http.post("/api/embed", json={"model": "tiny", "input": TEXTS[0], "dimensions": 2})
    assert one.json()["embeddings"] == [VECTORS[0][:2]]


async def test_a_prompt_is_embedded_without_normalization(encoder: Harness) -> None:
    answer = await encoder.http.post("/api/embeddings", json={"model": "tiny:latest", "prompt": TEXTS[0]})
    assert answer.json() == {"embedding": VECTORS[0]}
    (submit,) = encoder.scheduler.all("submit")
    assert submit.result.embedding.normalization == worker_v1.NORMALIZATION_NONE


async def test_a_call_without_texts_is_for_a_model_that_is_loaded(encoder: Harness) -> None:
    values: list[Any] = ["", []]
    for value in values:
        answer = await encoder.http.post("/api/embed", json={"model": "tiny", "input": value})
        assert answer.json() == {"model": "tiny", "embeddings": []}
    assert (await encoder.http.post("/api/embeddings", json={"model": "tiny"})).json() == {"embedding": []}
    assert (await encoder.http.post("/api/embed", json={"model": "other"})).status_code == 404
    assert not encoder.scheduler.all("submit")


async def test_a_long_text_is_cut_to_the_context(encoder: Harness) -> None:
    long = "a b c d " * 5
    cut = ids("[CLS] a b c d a b c d a b c d a b [SEP]")
    for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        assert (await encoder.http.post(path, json={field: long})).status_code == 200
        (submit,) = encoder.scheduler.all("submit")
        assert list(submit.prompt_token_ids) == cut
        answer = await encoder.http.post(path, json={field: long, "truncate": False})
        limit = "this model's maximum context length is 16 tokens"
        message = f"{field}: has 22 tokens, and {limit}: truncate keeps a part"
        assert (answer.status_code, answer.json()) == (400, {"error": message})
        encoder.scheduler.reset()
        encoder.scheduler.script = embed_with(vector_of)


async def test_errors_of_embeddings_have_the_protocols_form(encoder: Harness) -> None:
    for path, body, message in (
        ("/api/embed", {"input": ["a", 1]}, "input[1]: must be a string"),
        ("/api/embed", {"input": ["a", ""]}, "input[1]: must not be empty"),
        ("/api/embed", {"input": "a", "dimensions": 0}, "dimensions: must be between"),
        ("/api/embed", {"input": "a", "dimensions": 5}, "dimensions: must be at most 4"),
        ("/api/embeddings", {"prompt": "a", "input": "a"}, "input: is not served"),
    ):
        response = await encoder.http.post(path, json=body)
        assert response.status_code == 400
        (text,) = response.json().values()
        assert text.startswith(message)
    message = "computes no embedding"
    reason = scheduler_v1.FAILURE_REASON_UNSUPPORTED_RESULT
    encoder.scheduler.script = lambda session, submit: session.fail(submit.key, reason, message)
    for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        response = await encoder.http.post(path, json={field: "a"})
        assert (response.status_code, response.json()) == (400, {"error": f"model: {message}"})


async def test_a_model_that_embeds_is_shown_as_one(encoder: Harness) -> None:
    shown = (await encoder.http.post("/api/show", json={"model": "tiny:latest"})).json()
    assert (shown["capabilities"], shown["template"]) == (["embedding"], "")
