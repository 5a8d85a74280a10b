"""Classifications over the wire, with a scripted scheduler and a head of three labels."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from embedding_calls import LIMITS, leave, until_submitted
from encoder_model import ids, make_encoder_directory
from gateway_calls import refused
from gateway_harness import Harness, reason_of, running_gateway
from quire.inference.v1 import inference_pb2 as api
from quire_client import AsyncClient
from scripted_scheduler import embed_with

pytestmark = pytest.mark.asyncio(loop_scope="module")

LABELS = ["negative", "neutral", "positive"]
TEXTS = ["a b", "hello world c"]
TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}{{ last }}"
    "{% if add_generation_prompt %}d{% endif %}"
)


def numbers_of(token_ids: Sequence[int]) -> list[float]:
    """Numbers that differ with the prompt, and are exact in 32 bits."""
    return [0.25, len(token_ids) / 16, sum(token_ids) / 256]


KEYS = """
[[keys]]
key = "a-key-with-limits-0000"
tenant = "search"
max_running = 3
max_priority = -1
retention = "none"

[[keys]]
key = "a-key-of-another-model"
tenant = "chat"
models = ["another"]
"""
EXPECTED = [numbers_of(ids("[CLS] a b [SEP]")), numbers_of(ids("[CLS] hello world c [SEP]"))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A gateway for tests that change no state of it."""
    directory = make_encoder_directory(tmp_path_factory.mktemp("model"), labels=LABELS)
    async with running_gateway(directory, **LIMITS, chat_template=TEMPLATE) as harness:
        yield harness


@pytest.fixture
def shared(module_gateway: Harness) -> Harness:
    """The module's gateway. Its scheduler computes all numbers."""
    module_gateway.scheduler.reset()
    module_gateway.scheduler.script = embed_with(numbers_of)
    return module_gateway


async def test_each_input_is_one_submission(shared: Harness) -> None:
    answer = (await shared.http.post("/classify", json={"input": TEXTS, "priority": 2, "retention": "none"})).json()
    assert answer["data"] == [
        {
            "index": index,
            "label": LABELS[numbers.index(max(numbers))],
            "probs": numbers,
            "num_classes": 3,
        }
        for index, numbers in enumerate(EXPECTED)
    ]
    assert answer["id"].startswith("classify-")
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    submits = shared.scheduler.all("submit")
    assert [list(submit.prompt_token_ids) for submit in submits] == [
        ids("[CLS] a b [SEP]"),
        ids("[CLS] hello world c [SEP]"),
    ]
    for submit in submits:
        assert (submit.n, submit.max_tokens, submit.priority, submit.detachable) == (1, 0, 2, False)
        assert submit.retention.is_unrecorded
        assert submit.result.WhichOneof("kind") == "score"
        assert (submit.result.score.num_first_tokens, submit.result.score.is_raw) == (0, False)


@pytest.mark.parametrize(
    ("options", "is_raw"),
    [
        ({"raw_scores": True}, True),
        ({"use_activation": False}, True),
        ({"use_activation": True, "raw_scores": False}, False),
        ({"activation": True, "softmax": True, "return_all_scores": True}, False),
    ],
)
async def test_the_activation_may_be_left_out(options: dict[str, Any], is_raw: bool, shared: Harness) -> None:
    assert (await shared.http.post("/classify", json={"input": "a", **options})).status_code == 200
    assert [submit.result.score.is_raw for submit in shared.scheduler.all("submit")] == [is_raw]


async def test_a_chat_is_one_input(shared: Harness) -> None:
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    for fields, text in (
        ({}, "hello world"),
        ({"add_special_tokens": True}, "[CLS] hello world [SEP]"),
        ({"chat_template_kwargs": {"last": "c"}}, "hello world c"),
        ({"add_generation_prompt": True}, "hello world d"),
        ({"continue_final_message": True, "truncate_prompt_tokens": 1, "truncation_side": "left"}, "world"),
    ):
        answer = (await shared.http.post("/classify", json={"messages": chat, **fields})).json()
        assert [one["probs"] for one in answer["data"]] == [numbers_of(ids(text))]


async def test_the_contract_has_them(shared: Harness) -> None:
    inputs = [api.EmbedInput(text=TEXTS[0]), api.EmbedInput(token_ids=api.TokenIds(ids=[5, 6, 7]))]
    call = shared.stub.Classify(api.ClassifyRequest(inputs=inputs, raw_scores=True, truncate_prompt_tokens=3))
    response = await call
    assert list(response.labels) == LABELS
    assert [list(one.scores) for one in response.classifications] == [
        numbers_of(ids("[CLS] a [SEP]")),
        numbers_of([5, 6, 7]),
    ]
    assert (response.model, response.usage.prompt_tokens, response.usage.completion_tokens) == ("tiny", 6, 0)
    assert dict(await call.initial_metadata())["x-request-id"]
    assert all(submit.result.score.is_raw for submit in shared.scheduler.all("submit"))


async def test_the_python_clients_classify(shared: Harness) -> None:
    async with AsyncClient(f"127.0.0.1:{shared.gateway.grpc_port}") as client:
        found = await client.classify(TEXTS)
    assert (found.model, found.labels) == ("tiny", tuple(LABELS))
    assert found.scores == tuple(map(tuple, EXPECTED))


async def test_a_sagemaker_container_classifies(shared: Harness) -> None:
    body = {"input": TEXTS, "model": "tiny"}
    bodies = [
        (await shared.http.post(path, json=body)).json() | {"id": "", "created": 0}
        for path in ("/classify", "/invocations")
    ]
    assert bodies[0] == bodies[1]
    unknown = await shared.http.post("/invocations", json={**body, "model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({}, "invalid_field", "input"),
        ({"input": []}, "invalid_field", "input"),
        ({"input": ["a", ""]}, "invalid_field", "input[1]"),
        ({"input": ["a", "a b c d " * 5]}, "context_length_exceeded", "input[1]"),
        ({"input": ["a"] * 2_049}, "invalid_field", "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "invalid_field", "messages"),
        ({"input": "a", "use_activation": True, "raw_scores": True}, "invalid_field", "raw_scores"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "invalid_field", "truncate_prompt_tokens"),
        ({"input": "a", "dimensions": 8}, "feature_unsupported", "dimensions"),
        ({"input": "a", "top_k": 2}, "feature_unsupported", "top_k"),
        ({"input": "a", "padding": "max_length"}, "feature_unsupported", "padding"),
        ({"inputs": "a"}, "feature_unsupported", "inputs"),
        ({"input": "a", "activation": False}, "feature_unsupported", "activation"),
        ({"input": "a", "softmax": False}, "feature_unsupported", "softmax"),
        ({"input": "a", "function_to_apply": "none"}, "feature_unsupported", "function_to_apply"),
        ({"input": "a", "return_all_scores": False}, "feature_unsupported", "return_all_scores"),
        ({"input": "a", "text_pair": "b"}, "feature_unsupported", "text_pair"),
        ({"input": "a", "labels": ["b", "c"]}, "feature_unsupported", "labels"),
        ({"input": "a", "candidate_labels": ["b", "c"]}, "feature_unsupported", "candidate_labels"),
        ({"input": "a", "encoding_format": "base64"}, "feature_unsupported", "encoding_format"),
        ({"input": "a", "model": "other"}, "model_not_found", "model"),
    ],
)
async def test_errors_name_the_field(body: dict[str, Any], code: str, field: str, shared: Harness) -> None:
    error = (await shared.http.post("/classify", json=body)).json()["error"]
    assert (error["code"], error["param"]) == (code, field)
    assert not shared.scheduler.all("submit")


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({}, "INVALID_FIELD", "inputs"),
        ({"inputs": [{}]}, "INVALID_FIELD", "inputs[0]"),
        ({"inputs": [{"text": "a"}, {"text": ""}]}, "INVALID_FIELD", "inputs[1].text"),
        ({"inputs": [{"token_ids": {"ids": [5, 999]}}]}, "INVALID_FIELD", "inputs[0].token_ids.ids[1]"),
        ({"inputs": [{"text": "a " * 20}]}, "CONTEXT_LENGTH_EXCEEDED", "inputs[0].text"),
        ({"inputs": [{"text": "a"}], "truncation_side": 3}, "INVALID_FIELD", "truncation_side"),
        ({"inputs": [{"text": "a"}], "truncate_prompt_tokens": 0}, "INVALID_FIELD", "truncate_prompt_tokens"),
        ({"inputs": [{"text": "a"}], "retention": {}}, "INVALID_FIELD", "retention"),
    ],
)
async def test_errors_name_the_field_of_a_message(
    fields: dict[str, Any], reason: str, field: str, shared: Harness
) -> None:
    error = await refused(shared.stub.Classify(api.ClassifyRequest(**fields)))
    assert reason_of(error) == (reason, field)
    assert not shared.scheduler.all("submit")


async def test_a_worker_with_other_labels_is_an_error(shared: Harness) -> None:
    shared.scheduler.script = embed_with(lambda _: [0.5, 0.5])
    answer = await shared.http.post("/classify", json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")


async def test_a_cross_encoder_has_one_label(tmp_path: Path) -> None:
    directory = make_encoder_directory(tmp_path, labels=["relevant"])
    async with running_gateway(directory, **LIMITS) as harness:
        harness.scheduler.script = embed_with(lambda _: [0.75])
        for path in ("/classify", "/invocations"):
            answer = (await harness.http.post(path, json={"input": "a"})).json()
            assert answer["data"] == [{"index": 0, "label": "relevant", "probs": [0.75], "num_classes": 1}]


async def test_a_model_without_labels_does_not_classify(encoder_directory: Path) -> None:
    async with running_gateway(encoder_directory, **LIMITS) as harness:
        error = (await harness.http.post("/classify", json={"input": "a"})).json()["error"]
        assert (error["code"], error["param"]) == ("feature_unsupported", "model")
        assert "has no labels" in error["message"]
        over_grpc = await refused(harness.stub.Classify(api.ClassifyRequest(inputs=[api.EmbedInput(text="a")])))
        assert reason_of(over_grpc) == ("FEATURE_UNSUPPORTED", "model")
        assert not harness.scheduler.all("submit")


async def test_a_model_with_several_labels_does_not_score(shared: Harness) -> None:
    for path, body in (
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        error = (await shared.http.post(path, json=body)).json()["error"]
        assert (error["code"], error["param"]) == ("feature_unsupported", "model")
        assert error["message"] == "model: has 3 labels, so it classifies texts and scores no pairs of them"
    over_grpc = await refused(shared.stub.Score(api.ScoreRequest(queries=["a"], documents=["b"])))
    assert reason_of(over_grpc) == ("FEATURE_UNSUPPORTED", "model")
    assert not shared.scheduler.all("submit")


async def test_a_client_that_leaves_cancels_its_inputs(shared: Harness) -> None:
    shared.scheduler.reset()
    await leave(shared, asyncio.create_task(shared.http.post("/classify", json={"input": TEXTS})), 2)
    inputs = [api.EmbedInput(text=text) for text in TEXTS]
    await leave(shared, shared.stub.Classify(api.ClassifyRequest(inputs=inputs)), 2)


async def test_a_deadline_ends_a_call(shared: Harness) -> None:
    shared.scheduler.reset()
    answer = await shared.http.post("/classify", json={"input": TEXTS}, headers={"x-request-timeout": "0.3"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    for submit in await until_submitted(shared, 2):
        assert 0 < submit.time_left.ToNanoseconds() <= 300_000_000


async def test_limits_of_a_key_hold_for_each_input(tmp_path: Path) -> None:
    directory = make_encoder_directory(tmp_path / "model", labels=LABELS)
    (tmp_path / "keys.toml").write_text(KEYS)
    limited, other = (
        {"authorization": f"Bearer {key}"} for key in ("a-key-with-limits-0000", "a-key-of-another-model")
    )
    async with running_gateway(directory, api_keys=tmp_path / "keys.toml", **LIMITS) as quire:
        quire.scheduler.script = embed_with(numbers_of)
        for path in ("/classify", "/invocations"):
            assert (await quire.http.post(path, json={"input": TEXTS})).status_code == 401
            for model in ({}, {"model": "tiny"}):
                refusal = await quire.http.post(path, json={"input": TEXTS, **model}, headers=other)
                assert (refusal.status_code, refusal.json()["error"]["code"]) == (404, "model_not_found")
        assert not quire.scheduler.all("submit")
        await quire.http.post("/classify", json={"input": TEXTS}, headers=limited)
        submits = quire.scheduler.all("submit")
        assert len(submits) == 2
        for submit in submits:
            assert (submit.tenant, submit.limits.max_running, submit.priority) == ("search", 3, -1)
            assert submit.retention.is_unrecorded
        for fields in ({"priority": 0}, {"retention": "until_end"}):
            answer = await quire.http.post("/classify", json={"input": TEXTS, **fields}, headers=limited)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))


async def test_an_answer_beyond_the_largest_message_is_refused_by_the_field(tmp_path: Path) -> None:
    labels = [f"label {number}" for number in range(2**16)]
    directory = make_encoder_directory(tmp_path, labels=labels)
    async with running_gateway(directory, **LIMITS) as harness:
        harness.scheduler.script = embed_with(lambda _: [0.5] * len(labels))
        inputs = [api.EmbedInput(text="a")] * 64  # 4 bytes for each number: 16 MiB without the labels
        error = await refused(harness.stub.Classify(api.ClassifyRequest(inputs=inputs)))
        assert reason_of(error) == ("MESSAGE_TOO_LARGE", "inputs")
        async with AsyncClient(f"127.0.0.1:{harness.gateway.grpc_port}") as client:
            assert len((await client.classify(["a"] * 60)).scores) == 60
