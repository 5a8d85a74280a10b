"""Invalid requests of every kind, over both protocols: the documented status, the name of the field, and the next
request works."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from deployment import Deployment, deployment
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1.inference_pb2_grpc import InferenceServiceStub

METHOD = "/quire.inference.v1.InferenceService/Generate"
JSON = {"content-type": "application/json"}
LONG = [7] * 9000
NAN = float("nan")

# Description; generation over gRPC; body over HTTP; reason; field name over gRPC and over HTTP.
Case = tuple[str, dict[str, Any], dict[str, Any], str, str, str]
CASES: list[Case] = [
    ("empty prompt", {"text": ""}, {"prompt": ""}, "INVALID_FIELD", "text", "prompt"),
    ("no tokens", {"token_ids": {}}, {"prompt": []}, "INVALID_FIELD", "token_ids.ids", "prompt"),
    ("unknown model", {"text": "a", "model": "x"}, {"prompt": "a", "model": "x"}, "MODEL_NOT_FOUND", "model", "model"),
    (
        "long prompt",
        {"token_ids": {"ids": LONG}},
        {"prompt": LONG},
        "CONTEXT_LENGTH_EXCEEDED",
        "token_ids.ids",
        "prompt",
    ),
    (
        "NaN",
        {"text": "a", "sampling": {"temperature": NAN}},
        {"prompt": "a", "temperature": NAN},
        "INVALID_FIELD",
        "sampling.temperature",
        "temperature",
    ),
    (
        "temperature below 0",
        {"text": "a", "sampling": {"temperature": -1}},
        {"prompt": "a", "temperature": -1},
        "INVALID_FIELD",
        "sampling.temperature",
        "temperature",
    ),
    (
        "top_p 0",
        {"text": "a", "sampling": {"top_p": 0}},
        {"prompt": "a", "top_p": 0},
        "INVALID_FIELD",
        "sampling.top_p",
        "top_p",
    ),
    (
        "max_tokens 0",
        {"text": "a", "stopping": {"max_tokens": 0}},
        {"prompt": "a", "max_tokens": 0},
        "INVALID_FIELD",
        "stopping.max_tokens",
        "max_tokens",
    ),
    (
        "max_tokens below 0",  # over gRPC the field is unsigned: -1 arrives wrapped, far beyond the context
        {"text": "a", "stopping": {"max_tokens": 2**32 - 1}},
        {"prompt": "a", "max_tokens": -1},
        "",
        "stopping.max_tokens",
        "max_tokens",
    ),
    ("n = 0", {"text": "a", "n": 0}, {"prompt": "a", "n": 0}, "INVALID_FIELD", "n", "n"),
    (
        "token id out of range",
        {"token_ids": {"ids": [5, 49152]}},
        {"prompt": [5, 49152]},
        "INVALID_FIELD",
        "token_ids.ids[1]",
        "prompt[1]",
    ),
]


@pytest.fixture(scope="module")
def running(shallow_model: object) -> Iterator[Deployment]:
    with deployment() as started:
        yield started


@pytest.fixture
async def channel(running: Deployment) -> Any:
    async with grpc.aio.insecure_channel(running.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        yield channel
        answer = await InferenceServiceStub(channel).Generate(
            pb.GenerateRequest(generation=pb.Generation(text="a", stopping=pb.Stopping(max_tokens=1)))
        )
        assert answer.usage.completion_tokens == 1


@pytest.fixture
async def http(running: Deployment) -> Any:
    async with httpx.AsyncClient(base_url=running.http, timeout=60) as client:
        yield client
        answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200


def details(error: grpc.aio.AioRpcError) -> tuple[str, list[str]]:
    """ErrorInfo.reason and the fields of BadRequest."""
    status = rpc_status.from_call(error)
    assert status is not None
    reason, fields = "", []
    for detail in status.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            assert info.domain == "quire"
            reason = info.reason
        if detail.Unpack(bad):
            fields = [violation.field for violation in bad.field_violations]
    return reason, fields


async def call(stub: Any, rpc: str, generation: pb.Generation) -> None:
    """Sends the request and reads the first response."""
    if rpc == "Generate":
        await stub.Generate(pb.GenerateRequest(generation=generation))
    else:
        await stub.StreamGenerate(pb.StreamGenerateRequest(generation=generation)).read()


@pytest.mark.parametrize("rpc", ["Generate", "StreamGenerate"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
async def test_grpc_names_the_field(channel: grpc.aio.Channel, case: Case, rpc: str) -> None:
    _, values, _, reason, field, _ = case
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(InferenceServiceStub(channel), rpc, pb.Generation(**values))
    expected = "NOT_FOUND" if reason == "MODEL_NOT_FOUND" else "INVALID_ARGUMENT"
    assert raised.value.code().name == expected
    received, fields = details(raised.value)
    assert received == (reason or received)
    assert [name.removeprefix("generation.") for name in fields] == [field]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
async def test_http_names_the_field(http: httpx.AsyncClient, case: Case, streams: bool) -> None:
    _, _, values, reason, _, param = case
    body = {**values, "stream": streams}
    answer = await http.post("/v1/completions", content=json.dumps(body), headers=JSON)
    assert answer.status_code == (404 if reason == "MODEL_NOT_FOUND" else 400)
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["code"] == (reason.lower() or error["code"])
    assert error["message"]


async def test_field_that_is_not_served_is_refused_by_name(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "a", "prompt_embeds": "AAAA"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_embeds"
    assert answer.json()["error"]["code"].upper() == "FEATURE_UNSUPPORTED"


async def test_field_of_a_later_contract_is_refused_by_number(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
    later = b"\xf2\x06\x01b"  # field 110, a string
    generation = pb.Generation(text="a").SerializeToString() + later
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(b"\x0a" + bytes([len(generation)]) + generation)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(raised.value) == ("FEATURE_UNSUPPORTED", ["generation.110"])


async def test_random_bytes_are_a_malformed_message(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(b"\xff\x13\x37" * 50)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(raised.value) == ("MALFORMED_MESSAGE", [])


async def test_random_bytes_over_http(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", content=b"\xff\x13\x37" * 50, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_message_of_100_mb_is_too_large(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(bytes(100_000_000))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_body_of_100_mb_is_too_large(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", content=bytes(100_000_000), headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"]
