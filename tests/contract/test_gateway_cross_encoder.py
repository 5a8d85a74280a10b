"""Scores and reranking over the wire, with a scripted scheduler and a cross-encoder."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from embedding_calls import LIMITS
from encoder_model import WORDS, ids, make_encoder_directory
from gateway_calls import refused
from gateway_harness import Harness, reason_of, running_gateway
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire_client import AsyncClient
from reranker_files import write_reranker_files
from scripted_scheduler import embed_with
from tiny_model import make_model_directory, tiny_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCORES = ("/score", "/v1/score")
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
PAIR: dict[str, Any] = {"queries": "a", "documents": "b"}
QUERY: dict[str, Any] = {"query": "a", "documents": ["b", "a b c d", "a"]}


def score_of(token_ids: Sequence[int]) -> list[float]:
    """A number, which differs with the prompt, and is exact in 32 bits."""
    return [len(token_ids) / 4 - sum(token_ids) / 64]


def expected(query: str, *documents: str) -> list[float]:
    return [score_of(ids(f"[CLS] {query} [SEP] {document} [SEP]"))[0] for document in documents]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A gateway for tests that change no state of it."""
    directory = make_encoder_directory(tmp_path_factory.mktemp("model"), labels=["LABEL_0"])
    async with running_gateway(directory, **LIMITS) as harness:
        yield harness


@pytest.fixture
def shared(module_gateway: Harness) -> Harness:
    """The module's gateway. Its scheduler computes all scores."""
    module_gateway.scheduler.reset()
    module_gateway.scheduler.script = embed_with(score_of)
    return module_gateway


@pytest.mark.parametrize("path", SCORES)
async def test_each_pair_is_one_submission(path: str, shared: Harness) -> None:
    body = {"queries": "a", "documents": ["b", "c d", "b"], "priority": 2, "retention": "none"}
    answer = (await shared.http.post(path, json=body)).json()
    assert [one["score"] for one in answer["data"]] == expected("a", "b", "c d", "b")
    submits = shared.scheduler.all("submit")
    assert [list(submit.prompt_token_ids) for submit in submits] == [
        ids("[CLS] a [SEP] b [SEP]"),
        ids("[CLS] a [SEP] c d [SEP]"),
    ]
    assert answer["usage"] == {"prompt_tokens": 11, "total_tokens": 11}
    for submit in submits:
        assert (submit.n, submit.max_tokens, submit.priority, submit.detachable) == (1, 0, 2, False)
        assert submit.retention.is_unrecorded
        assert (submit.result.score.num_first_tokens, submit.result.score.is_raw) == (3, False)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_prompts_of_pairs_count_among_the_bytes_of_bodies(protocol: str, tmp_path: Path) -> None:
    """A query of 16 KB is 66 MB of prompts with a thousand documents."""
    directory = make_encoder_directory(tmp_path / "model", labels=["LABEL_0"])
    query, documents = "a " * 8_000, [f"{'b ' * (index // 32)}{'c ' * (index % 32)}d" for index in range(1_024)]
    async with running_gateway(directory, context_length=8_192, vocab_size=len(WORDS), body_memory=2**-5) as quire:
        for texts, status in ((documents, 503), (documents[:8], 200), (documents, 503)):
            quire.scheduler.reset()
            quire.scheduler.script = embed_with(score_of)
            if protocol == "http":
                body = {"query": query, "documents": texts, "return_documents": False}
                answer = await quire.http.post("/rerank", json=body)
                assert answer.status_code == status
                error = answer.json().get("error", {})
                assert status == 200 or (error["code"], error["param"]) == ("capacity_exhausted", None)
            elif status == 200:
                await quire.stub.Score(api.ScoreRequest(queries=[query], documents=texts))
            else:
                error = await refused(quire.stub.Score(api.ScoreRequest(queries=[query], documents=texts)))
                assert reason_of(error) == ("CAPACITY_EXHAUSTED", "")
            assert len(quire.scheduler.all("submit")) == (8 if status == 200 else 0)


@pytest.mark.parametrize("path", RERANKS)
async def test_documents_are_sorted(path: str, shared: Harness) -> None:
    results = (await shared.http.post(path, json={**QUERY, "top_n": 2, "raw_scores": True})).json()["results"]
    scores = dict(zip(QUERY["documents"], expected("a", *QUERY["documents"]), strict=True))
    assert [one["document"]["text"] for one in results] == sorted(scores, key=lambda one: -scores[one])[:2]
    assert [one["relevance_score"] for one in results] == sorted(scores.values(), reverse=True)[:2]
    assert all(submit.result.score.is_raw for submit in shared.scheduler.all("submit"))


async def test_the_contract_has_them(shared: Harness) -> None:
    request = api.ScoreRequest(queries=["a", "b"], documents=["c", "d"], raw_scores=True, truncate_prompt_tokens=5)
    call = shared.stub.Score(request)
    response = await call
    assert list(response.scores) == [*expected("a", "c"), *expected("b", "d")]
    assert (response.model, response.usage.prompt_tokens, response.usage.completion_tokens) == ("tiny", 10, 0)
    assert dict(await call.initial_metadata())["x-request-id"]
    assert all(submit.result.score.is_raw for submit in shared.scheduler.all("submit"))


async def test_the_python_clients_score(shared: Harness) -> None:
    async with AsyncClient(f"127.0.0.1:{shared.gateway.grpc_port}") as client:
        found = await client.score("a", ["b", "c d"], max_tokens_per_document=1)
    assert (found.model, found.scores) == ("tiny", tuple(expected("a", "b", "c")))


async def test_a_sagemaker_container_scores(shared: Harness) -> None:
    for path, body in (("/rerank", QUERY), ("/score", {"text_1": "a", "text_2": "b"})):
        answers = [await shared.http.post(one, json=body) for one in (path, "/invocations")]
        bodies = [answer.json() | {"id": "", "created": 0} for answer in answers]
        assert bodies[0] == bodies[1]


async def test_errors_name_the_text(shared: Harness) -> None:
    long = "a b c d " * 5
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("/score", {"text_1": "a", "text_2": ["b", long]}, "context_length_exceeded", "text_2[1]"),
        ("/rerank", {"query": long, "documents": ["b"]}, "context_length_exceeded", "query"),
        ("/rerank", {"query": "a", "documents": ["b", {"text": ""}]}, "invalid_field", "documents[1].text"),
        ("/score", {**PAIR, "truncate_prompt_tokens": 4}, "invalid_field", "truncate_prompt_tokens"),
    ]
    for path, body, code, field in cases:
        answer = await shared.http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, code, field)
    error = await refused(shared.stub.Score(api.ScoreRequest(queries=["a"], documents=["b", long])))
    assert reason_of(error) == ("CONTEXT_LENGTH_EXCEEDED", "documents[1]")
    assert not shared.scheduler.all("submit")


async def test_what_the_model_does_not_compute_is_refused_by_name(shared: Harness) -> None:
    reason = scheduler_v1.FAILURE_REASON_UNSUPPORTED_RESULT

    def script(session: Any, submit: scheduler_v1.Submit) -> None:
        kind = submit.result.WhichOneof("kind") or "tokens"
        session.fail(submit.key, reason, f"computes no {kind}")

    shared.scheduler.script = script
    for path, body, kind in (
        ("/v1/embeddings", {"input": "a"}, "embedding"),
        ("/v1/completions", {"prompt": "a"}, "tokens"),
        ("/score", PAIR, "score"),
    ):
        error = (await shared.http.post(path, json=body)).json()["error"]
        assert (error["code"], error["message"]) == (
            "feature_unsupported",
            f"model: computes no {kind}",
        )


async def test_a_value_of_several_classes_is_an_error(shared: Harness) -> None:
    shared.scheduler.script = embed_with(lambda token_ids: [0.5, 0.5])
    answer = await shared.http.post("/score", json=PAIR)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")


async def test_ollama_names_no_capability(shared: Harness) -> None:
    assert (await shared.http.post("/api/show", json={"model": "tiny"})).json()["capabilities"] == []


async def test_an_instruction_is_for_models_that_read_pairs_as_chats(shared: Harness, tmp_path: Path) -> None:
    for path, body in (("/score", PAIR), ("/rerank", QUERY)):
        for name in ("instruction", "instruct"):
            response = await shared.http.post(path, json={**body, name: "Find."})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == name
    make_model_directory(tmp_path)
    write_reranker_files(tmp_path, 5, 6)
    async with running_gateway(tmp_path, context_length=200) as harness:
        harness.scheduler.script = embed_with(score_of)
        async with AsyncClient(f"127.0.0.1:{harness.gateway.grpc_port}") as client:
            await client.score("a", ["b"], instruction="Find.")
        await harness.http.post("/rerank", json={"query": "a", "documents": ["b"], "instruct": "Find."})
        prompts = [tiny_tokenizer().decode(list(one.prompt_token_ids)) for one in harness.scheduler.all("submit")]
    assert prompts == ["Task: Find.\nQuery: a\nDocument: bAnswer:"] * 2
