"""Refusals before a request is submitted, counted by protocol and reason."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway_calls import asking
from gateway_harness import Harness, running_gateway
from gateway_svc.http_api.exchange import MAX_BODY_BYTES
from quire.inference.v1 import inference_pb2 as api
from quire.open_inference.v2.open_inference_pb2_grpc import GRPCInferenceServiceStub

KEY = {"x-api-key": "the-own-key-of-alice"}
PATH = "/v1/chat/completions"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nkey = "the-own-key-of-alice"\ntenant = "alice"\n')
    return path


async def counts(quire: Harness) -> dict[tuple[str, str], float]:
    """The refusals so far, by protocol and reason."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        page = (await client.get(f"http://127.0.0.1:{quire.gateway.metrics_port}/metrics")).text
    found = {}
    for line in page.splitlines():
        if line.startswith("quire_gateway_refusals_total{"):
            labels, value = line.rsplit(" ", 1)
            _, protocol, _, reason, _ = labels.split('"')
            found[protocol, reason] = float(value)
    return found


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code()


async def test_refusals_over_http(model_directory: Path, keys: Path) -> None:
    async with running_gateway(
        model_directory, api_keys=keys, gateway_metrics_port=0, allowed_hosts="quire.test", http_read_timeout=0.5
    ) as quire:
        await quire.http.post(PATH, json={}, headers={"x-api-key": "a key that the gateway does not know"})
        await quire.http.get("/health", headers={"host": "elsewhere.test"})
        body = b" " * (MAX_BODY_BYTES + 1)
        response = await quire.http.post(PATH, content=body, headers={**KEY, "content-type": "application/json"})
        assert response.status_code == 413
        reader, writer = await asyncio.open_connection("127.0.0.1", quire.gateway.http_port)
        writer.write(b"nothing that HTTP knows\r\n\r\n")
        await asyncio.wait_for(reader.read(), 60)
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", quire.gateway.http_port)
        await asyncio.wait_for(reader.read(), 60)
        writer.close()
        found = await counts(quire)
        assert found["http", "credential"] == 1
        assert found["http", "host"] == 1
        assert found["http", "too_large"] == 1
        assert found["http", "malformed"] == 1
        assert found["http", "too_late"] >= 1
        assert {reason for _, reason in found} <= {"credential", "host", "too_large", "malformed", "too_late"}


async def test_connections_that_are_closed_for_others(model_directory: Path, keys: Path) -> None:
    async with running_gateway(model_directory, api_keys=keys, gateway_metrics_port=0, max_http_connections=2) as quire:
        async with connect(f"ws://127.0.0.1:{quire.gateway.http_port}{PATH}", additional_headers=KEY) as idle:
            opened = [await asyncio.open_connection("127.0.0.1", quire.gateway.http_port) for _ in range(3)]
            await asyncio.wait_for(idle.wait_closed(), 60)
            await asyncio.wait_for(opened[0][0].read(), 60)
        assert await counts(quire) == {("websocket", "connections"): 1, ("http", "connections"): 1}
        for _, writer in opened:
            writer.close()


async def test_refusals_over_grpc(model_directory: Path, keys: Path) -> None:
    request = api.GenerateRequest(generation=asking().generation)
    async with running_gateway(
        model_directory, api_keys=keys, gateway_metrics_port=0, grpc_read_timeout=0.5, max_tenant_calls=1
    ) as quire:
        metadata = tuple(KEY.items())
        assert await code_of(quire.stub.Generate(request)) is grpc.StatusCode.UNAUTHENTICATED
        stream = GRPCInferenceServiceStub(quire.channel).ModelStreamInfer()
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
        running = quire.stub.Generate(request, metadata=metadata)
        async with asyncio.timeout(60):
            while not quire.scheduler.all("submit"):
                await asyncio.sleep(0.01)
        refused = quire.stub.Generate(request, metadata=metadata)
        assert await code_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(await refused.trailing_metadata())["x-request-id"]
        running.cancel()
        found = await counts(quire)
        assert found == {("grpc", "credential"): 2, ("grpc", "calls"): 1}


async def test_a_grpc_message_that_does_not_come(model_directory: Path) -> None:
    async with running_gateway(model_directory, gateway_metrics_port=0, grpc_read_timeout=0.5) as quire:
        method: Any = quire.channel.stream_unary("/quire.inference.v1.InferenceService/Generate")
        call = method()
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await counts(quire) == {("grpc", "too_late"): 1}


async def test_refusals_over_websockets(model_directory: Path, keys: Path) -> None:
    async with running_gateway(model_directory, api_keys=keys, gateway_metrics_port=0) as quire:
        url = f"ws://127.0.0.1:{quire.gateway.http_port}{PATH}"
        for headers in ({}, {**KEY, "origin": "http://elsewhere.test"}):
            with pytest.raises(InvalidStatus):
                await connect(url, additional_headers=headers)
        async with connect(url, additional_headers=KEY) as connection:
            await connection.send(b"no text")
            await asyncio.wait_for(connection.wait_closed(), 60)
        async with connect(url, additional_headers=KEY) as connection:
            with suppress(ConnectionClosed):  # it is closed while this sends
                await connection.send("a" * (MAX_BODY_BYTES + 1))
            await asyncio.wait_for(connection.wait_closed(), 60)
        assert await counts(quire) == {
            ("websocket", "credential"): 1,
            ("websocket", "origin"): 1,
            ("websocket", "malformed"): 1,
            ("websocket", "too_large"): 1,
        }
