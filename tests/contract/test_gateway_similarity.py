"""Scores and reranking over the wire, with a scripted scheduler and a model as BERT; and SageMaker's route for them."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from httpx import Response

from embedding_calls import LIMITS, leave, until_submitted, vector_of
from encoder_model import CONTEXT_LENGTH, ids
from gateway_harness import Harness, running_gateway
from gateway_svc import work_costs
from gateway_svc.http_api.embeddings import cohere_routes
from gateway_svc.http_api.scoring import routes as scoring_routes
from gateway_svc.request_manager import RequestManager
from gateway_svc.similarity import InputPairs
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import embed_with

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCORES = ("/score", "/v1/score")
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
PAIR: dict[str, Any] = {"queries": "a", "documents": "b"}
QUERY: dict[str, Any] = {"query": "a", "documents": ["b", "a b c d", "a"]}
KEYS = """
[[keys]]
key = "a-key-with-limits-0000"
tenant = "search"
max_running = 3
max_priority = -1
retention = "none"
"""


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


def cosine(left: str, right: str) -> float:
    """Of the vectors of two texts."""
    a, b = (vector_of(ids(f"[CLS] {text} [SEP]")) for text in (left, right))
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def scores_of(answer: Response) -> list[float]:
    assert [one["index"] for one in answer.json()["data"]] == list(range(len(answer.json()["data"])))
    return [one["score"] for one in answer.json()["data"]]


@pytest.mark.parametrize("path", SCORES)
@pytest.mark.parametrize(
    ("queries", "documents", "pairs"),
    [
        ("a", "b", ["a b"]),
        ("a", ["b", "c", "a"], ["a b", "a c", "a a"]),
        (["a", "b"], ["c", "d"], ["a c", "b d"]),
    ],
    ids=["one", "one with several", "pairs"],
)
async def test_scores_are_cosines(
    path: str, queries: Any, documents: Any, pairs: Sequence[str], shared: Harness
) -> None:
    answer = await shared.http.post(path, json={"model": "tiny", "queries": queries, "documents": documents})
    assert scores_of(answer) == pytest.approx([cosine(*pair.split()) for pair in pairs], rel=1e-12)
    body = answer.json()
    assert (body["object"], body["model"], body["id"]) == ("list", "tiny", f"score-{answer.headers['x-request-id']}")
    tokens = sum(len(submit.prompt_token_ids) for submit in shared.scheduler.all("submit"))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize("path", RERANKS)
async def test_documents_are_sorted(path: str, shared: Harness) -> None:
    answer = await shared.http.post(path, json={**QUERY, "top_n": 2})
    body, expected = answer.json(), {one: cosine("a", one) for one in QUERY["documents"]}
    assert (body["model"], body["id"]) == ("tiny", f"rerank-{answer.headers['x-request-id']}")
    assert [one["document"]["text"] for one in body["results"]] == sorted(expected, key=lambda one: -expected[one])[:2]
    for one in body["results"]:
        assert one["document"]["text"] == QUERY["documents"][one["index"]]
        assert one["relevance_score"] == pytest.approx(expected[one["document"]["text"]], rel=1e-12)
    assert body["results"][0]["relevance_score"] == pytest.approx(1)


async def test_a_text_is_embedded_once(shared: Harness) -> None:
    answer = await shared.http.post("/rerank", json={"query": "a", "documents": ["a", "b", "b", {"text": "a"}]})
    assert [one["index"] for one in answer.json()["results"]] == [0, 3, 1, 2]
    submits = shared.scheduler.all("submit")
    assert [list(submit.prompt_token_ids) for submit in submits] == [ids("[CLS] a [SEP]"), ids("[CLS] b [SEP]")]
    assert answer.json()["usage"]["prompt_tokens"] == 6


async def test_each_text_is_a_submission_of_its_own(shared: Harness) -> None:
    fields = {"priority": 2, "retention": "none"}
    answer = await shared.http.post("/score", json=PAIR | fields, headers={"idempotency-key": "mine"})
    first, second = shared.scheduler.all("submit")
    assert first.key != second.key
    for submit in (first, second):
        assert (submit.n, submit.max_tokens, submit.priority, submit.detachable) == (1, 0, 2, False)
        assert submit.retention.is_unrecorded
        embedding = submit.result.embedding
        assert (embedding.pooling, embedding.num_dimensions, embedding.normalization) == (0, 0, 0)
        assert submit.render_options.request_id == answer.headers["x-request-id"] != "mine"


async def test_queries_and_documents_are_cut(shared: Harness) -> None:
    def kept() -> list[list[int]]:
        submits = shared.scheduler.all("submit")
        shared.scheduler.reset()
        shared.scheduler.script = embed_with(vector_of)
        return [list(submit.prompt_token_ids) for submit in submits]

    body = {"text_1": "a b c", "text_2": "a b c d"}
    await shared.http.post("/score", json={**body, "max_tokens_per_query": 1, "max_tokens_per_doc": 2})
    assert kept() == [ids("[CLS] a [SEP]"), ids("[CLS] a b [SEP]")]
    await shared.http.post("/score", json={**body, "max_tokens_per_doc": 2, "truncate_prompt_tokens": 3})
    assert kept() == [ids("[CLS] a [SEP]"), ids("[CLS] a [SEP]")]
    await shared.http.post("/score", json={**body, "max_tokens_per_doc": 2, "truncation_side": "left"})
    assert kept() == [ids("[CLS] a b c [SEP]"), ids("[CLS] c d [SEP]")]
    await shared.http.post("/score", json={**body, "max_tokens_per_doc": CONTEXT_LENGTH - 2})
    assert kept() == [ids("[CLS] a b c [SEP]"), ids("[CLS] a b c d [SEP]")]


async def test_errors_name_the_text(shared: Harness) -> None:
    long = "a b c d " * 5
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("/score", {"text_1": "a", "text_2": ["b", long]}, "context_length_exceeded", "text_2[1]"),
        ("/rerank", {"query": "a", "documents": ["b", "a", "c", long]}, "context_length_exceeded", "documents[3]"),
        ("/rerank", {"query": long, "documents": ["b"]}, "context_length_exceeded", "query"),
        ("/rerank", {"query": "a", "documents": ["b", {"text": ""}]}, "invalid_field", "documents[1].text"),
        ("/rerank", {**QUERY, "max_tokens_per_doc": CONTEXT_LENGTH - 1}, "invalid_field", "max_tokens_per_doc"),
        ("/score", {**PAIR, "max_tokens_per_query": -1}, "invalid_field", "max_tokens_per_query"),
        ("/score", {**PAIR, "truncate_prompt_tokens": CONTEXT_LENGTH + 1}, "invalid_field", "truncate_prompt_tokens"),
    ]
    for path, body, code, field in cases:
        answer = await shared.http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, code, field)
    assert not shared.scheduler.all("submit")


async def test_a_model_that_embeds_nothing_is_said_to(shared: Harness) -> None:
    reason = scheduler_v1.FAILURE_REASON_UNSUPPORTED_RESULT
    message = "computes no embedding"
    shared.scheduler.script = lambda session, submit: session.fail(submit.key, reason, message)
    for path, body, num_texts in (("/score", PAIR, 2), ("/rerank", QUERY, 3)):  # "a" is there twice
        error = (await shared.http.post(path, json=body)).json()["error"]
        assert (error["code"], error["message"]) == ("feature_unsupported", f"model: {message}")
        for _ in range(num_texts):  # the first failure answers the call: the others may still be on their way
            await shared.scheduler.next("submit")


async def test_many_documents(shared: Harness) -> None:
    shared.scheduler.script = embed_with(lambda token_ids: [float(one) for one in token_ids] * 20)
    documents = [" ".join("abcd"[int(digit)] for digit in f"{number % 256:04}"[-4:] if digit < "4") or "a"
                 for number in range(1_024)]  # fmt: skip
    answer = await shared.http.post("/rerank", json={"query": "hello", "documents": documents})
    results = answer.json()["results"]
    assert sorted(one["index"] for one in results) == list(range(1_024))
    found = [one["relevance_score"] for one in results]
    assert found == sorted(found, reverse=True)
    assert len(shared.scheduler.all("submit")) == 1 + len(set(documents))


async def test_a_sagemaker_container_answers_bodies_of_other_routes(shared: Harness) -> None:
    headers = {"idempotency-key": "mine"}
    for path, body in (
        ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 2}),
        ("/rerank", QUERY),
        ("/score", PAIR),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/score", {"data_1": "a", "data_2": "b"}),
    ):
        answers = [await shared.http.post(one, json=body, headers=headers) for one in (path, "/invocations")]
        bodies = [answer.json() | {"id": "", "created": 0} for answer in answers]
        assert bodies[0] == bodies[1]
        assert answers[1].headers["x-request-id"] != "mine"
    error = (await shared.http.post("/invocations", json={"input": "a", "pooling": "none"})).json()["error"]
    assert error["param"] == "pooling"


async def test_metrics_count_calls_and_tokens(shared: Harness) -> None:
    calls = 'quire_gateway_requests_total{code="200",method="/v1/rerank",model="tiny",protocol="http"}'
    prompts = 'quire_gateway_prompt_tokens_total{model="tiny"}'
    before = [await shared.metric(line) for line in (calls, prompts)]
    await shared.http.post("/v1/rerank", json=QUERY)
    assert [await shared.metric(line) for line in (calls, prompts)] == [before[0] + 1, before[1] + 12]
    assert await shared.metric('quire_gateway_requests_in_flight{model="tiny"}') == 0


async def test_a_client_that_leaves_cancels_its_texts(shared: Harness) -> None:
    shared.scheduler.reset()
    await leave(shared, asyncio.create_task(shared.http.post("/score", json=PAIR)), 2)


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/score", PAIR, "validate_scores"),
        ("/rerank", QUERY, "validate_scores"),
        ("/v1/embeddings", {"input": "a"}, "validate_embeddings"),
        ("/classify", {"input": "a"}, "validate_classifications"),
    ],
    ids=["score", "rerank", "embeddings", "classify"],
)
async def test_a_client_that_leaves_ends_the_work_on_its_texts(
    path: str, body: dict[str, Any], method: str, shared: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand pairs take seconds to tokenize, before any of them is submitted."""
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def validate(*_: Any) -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    monkeypatch.setattr(RequestManager, method, validate)
    call = asyncio.create_task(shared.http.post(path, json=body))
    async with asyncio.timeout(10):
        await has_begun.wait()
        call.cancel()
        await has_ended.wait()
    assert not shared.scheduler.all("submit")


async def test_a_deadline_ends_a_call(shared: Harness) -> None:
    shared.scheduler.reset()
    answer = await shared.http.post("/rerank", json=QUERY, headers={"x-request-timeout": "0.3"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    for submit in await until_submitted(shared, 3):
        assert 0 < submit.time_left.ToNanoseconds() <= 300_000_000


async def test_limits_of_a_key_hold_for_each_text(encoder_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    headers = {"authorization": "Bearer a-key-with-limits-0000"}
    async with running_gateway(encoder_directory, api_keys=tmp_path / "keys.toml", **LIMITS) as quire:
        quire.scheduler.script = embed_with(vector_of)
        for path in (*SCORES, *RERANKS, "/invocations"):
            assert (await quire.http.post(path, json=PAIR)).status_code == 401
        await quire.http.post("/score", json=PAIR, headers=headers)
        submits = quire.scheduler.all("submit")
        assert len(submits) == 2
        for submit in submits:
            assert (submit.tenant, submit.limits.max_running, submit.priority) == ("search", 3, -1)
            assert submit.retention.is_unrecorded
        answer = await quire.http.post("/score", json={**PAIR, "priority": 0}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


async def test_many_pairs_of_the_same_texts_are_compared_in_threads(
    shared: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few vectors, which are long, there may be a thousand pairs."""
    in_thread: list[bool] = []
    compare = InputPairs.cosines

    def recorded(pairs: InputPairs, vectors: Any) -> list[float]:
        in_thread.append(threading.current_thread() is not threading.main_thread())
        return compare(pairs, vectors)

    monkeypatch.setattr(InputPairs, "cosines", recorded)
    shared.scheduler.script = embed_with(lambda _: [0.5] * 100)
    for num_pairs in (1, 300):
        documents = ["a"] * num_pairs
        answer = await shared.http.post("/score", json={"queries": "a", "documents": documents})
        assert scores_of(answer) == pytest.approx([1.0] * num_pairs)
        await shared.stub.Score(api.ScoreRequest(queries=["a"], documents=documents))
        await shared.http.post("/rerank", json={"query": "a", "documents": documents})
    assert in_thread == [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    ("path", "body", "module", "name"),
    [
        ("/rerank", {"query": "a", "documents": ["b", "hello"]}, scoring_routes, "rerank_answer"),
        ("/rerank", {"query": "a", "texts": ["b", "hello"], "return_text": True}, scoring_routes, "rerank_answer"),
        ("/v2/embed", {"texts": ["b", "hello"]}, cohere_routes, "embed_answer"),
    ],
    ids=["documents", "texts", "embed"],
)
async def test_answers_that_repeat_long_texts_are_made_in_threads(
    path: str, body: dict[str, Any], module: Any, name: str, shared: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_thread: list[bool] = []
    make = getattr(module, name)

    def recorded(*arguments: Any) -> Any:
        in_thread.append(threading.current_thread() is not threading.main_thread())
        return make(*arguments)

    monkeypatch.setattr(module, name, recorded)
    for cost in (work_costs.TEXT_CHARACTER, 1_000.0):
        monkeypatch.setattr(work_costs, "TEXT_CHARACTER", cost)
        answer = await shared.http.post(path, json=body)
        assert answer.status_code == 200
        assert "hello" in answer.text
    assert in_thread == [False, True]
