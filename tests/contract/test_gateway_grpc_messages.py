"""gRPC calls whose message does not arrive, and how long a message is kept."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway_calls import asking
from gateway_harness import MODEL, Harness, encoded, reason_of, running_gateway
from gateway_svc import grpc_admission
from quire.inference.v1 import inference_pb2 as api
from quire.open_inference.v2 import open_inference_pb2 as open_inference
from quire.open_inference.v2.open_inference_pb2_grpc import GRPCInferenceServiceStub
from scripted_scheduler import answer_with
from tiny_model import EOS

SERVICE = "/quire.inference.v1.InferenceService"
STREAMING = ("StreamGenerate", "Resume")


async def nothing(*, ends: bool = False) -> AsyncIterator[Any]:
    """No message, and the end of the stream only where asked for."""
    if not ends:
        await asyncio.Event().wait()
    for message in list[Any]():
        yield message


async def status(quire: Harness, method: str, *, ends: bool = False) -> tuple[grpc.StatusCode, str]:
    """Code and reason of a call without a message."""
    channel: Any = quire.channel
    if method.endswith(STREAMING):
        first = channel.stream_stream(method)(nothing(ends=ends), timeout=60).read()
    else:
        first = channel.stream_unary(method)(nothing(ends=ends), timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await first
    return raised.value.code(), reason_of(raised.value)[0]


METHODS = [
    *(f"{SERVICE}/{name}" for name in ("Generate", "StreamGenerate", "Resume", "Cancel", "Tokenize", "ListModels")),
    "/grpc.health.v1.Health/Check",
]


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_whose_message_does_not_come_is_ended(method: str, model_directory: Path) -> None:
    async with running_gateway(model_directory, grpc_read_timeout=0.3) as quire:
        assert await status(quire, method) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
        await quire.stub.Generate(api.GenerateRequest(generation=asking().generation))


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_that_ends_without_a_message_is_malformed(method: str, quire: Harness) -> None:
    assert await status(quire, method, ends=True) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")


@pytest.mark.parametrize("method", METHODS[:-1])
async def test_a_key_is_checked_before_the_message_is_read(method: str, model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "the-key-of-alice"\ntenant = "alice"\n')
    async with running_gateway(model_directory, api_keys=keys) as quire:
        assert await status(quire, method) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")


def inferring() -> open_inference.ModelInferRequest:
    """A request of the Open Inference protocol for a text."""
    request = open_inference.ModelInferRequest(model_name=MODEL)
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"hello")
    return request


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate", "ModelInfer", "ModelStreamInfer"])
async def test_a_message_is_kept_until_its_request_is_submitted(
    method: str, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[Any] = []
    note = grpc_admission._noting_bytes

    def keeping(parse: Any) -> Any:
        def parse_and_keep(data: bytes) -> Any:
            messages.append(parse(data))
            return messages[-1]

        return note(parse_and_keep)

    monkeypatch.setattr(grpc_admission, "_noting_bytes", keeping)
    async with running_gateway(model_directory) as quire:
        messages.clear()
        quire.scheduler.script = lambda session, submit: session.accept(submit.key)
        stub: Any = quire.stub if "Generate" in method else GRPCInferenceServiceStub(quire.channel)
        request: Any = inferring() if "Infer" in method else asking()
        if method == "Generate":
            request = api.GenerateRequest(generation=request.generation)
        if method == "ModelStreamInfer":
            call = stub.ModelStreamInfer()
            await call.write(request)
        else:
            call = getattr(stub, method)(request)
        await quire.scheduler.next("submit")
        (message,) = messages
        messages.clear()
        assert sys.getrefcount(message) == 2  # `message` and the argument
        call.cancel()


async def test_connections_have_a_bound(model_directory: Path) -> None:
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # the preface, and empty settings
    async with running_gateway(model_directory, max_grpc_connections=8) as quire:
        connections = [await asyncio.open_connection("127.0.0.1", quire.gateway.grpc_port) for _ in range(20)]
        num_open = 0
        for reader, writer in connections:
            with suppress(ConnectionError):
                writer.write(hello)
                async with asyncio.timeout(60):
                    num_open += bool(await reader.read(9))
        assert num_open == 7  # and the harness' own channel
        for _, writer in connections:
            writer.close()
        await quire.stub.ListModels(api.ListModelsRequest())


async def test_a_connection_without_calls_is_closed(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway_svc.gateway._GRPC_IDLE_SECONDS", 1)
    async with running_gateway(model_directory) as quire:
        reader, writer = await asyncio.open_connection("127.0.0.1", quire.gateway.grpc_port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        async with asyncio.timeout(60):
            await reader.read()
        writer.close()
        await quire.stub.ListModels(api.ListModelsRequest())
