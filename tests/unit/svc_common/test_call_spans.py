"""The span of each call: its trace, its status, and no more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from svc_common.call_spans import CallSpans
from svc_common.errors import QuireError, Reason
from svc_common.server import bind, create_server

SERVICE = "test.Service"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def respond(request: bytes, context: Any) -> bytes:
    match request:
        case b"refusal":
            raise QuireError(Reason.MODEL_NOT_FOUND, "no such model")
        case b"abort":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        case b"fault":
            raise ValueError("a part of a prompt")
        case b"wait":
            await asyncio.Event().wait()
    return trace.get_current_span().get_span_context().span_id.to_bytes(8)


async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield await respond(request, context)


async def write(request: bytes, context: Any) -> None:
    await context.write(await respond(request, context))


async def converse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield await respond(request, context)


async def gather(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return [await respond(request, context) async for request in requests][-1]


KINDS: dict[str, Any] = {
    "Unary": grpc.unary_unary_rpc_method_handler(respond),
    "Stream": grpc.unary_stream_rpc_method_handler(stream),
    "Writing": grpc.unary_stream_rpc_method_handler(write),
    "Conversing": grpc.stream_stream_rpc_method_handler(converse),
    "Gathering": grpc.stream_unary_rpc_method_handler(gather),
}


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[grpc.aio.Channel, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = CallSpans(SERVICE, provider.get_tracer("test"))
    server = create_server(max_message_bytes=2**20, interceptors=(spans,))
    for service in (SERVICE, "other.Service"):
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, KINDS)])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel, exporter
    await server.stop(None)


async def call(channel: Any, kind: str, request: bytes, *, service: str = SERVICE, **options: Any) -> bytes:
    """The only response."""
    method = f"/{service}/{kind}"
    match kind:
        case "Unary":
            return bytes(await channel.unary_unary(method)(request, **options))
        case "Gathering":
            return bytes(await channel.stream_unary(method)([request], **options))
        case "Conversing":
            responses = channel.stream_stream(method)([request], **options)
        case _:
            responses = channel.unary_stream(method)(request, **options)
    (response,) = [response async for response in responses]
    return bytes(response)


async def the_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    """The finished span, which may end after the client has its response."""
    async with asyncio.timeout(60):
        while not exporter.get_finished_spans():
            await asyncio.sleep(0.01)
    (span,) = exporter.get_finished_spans()
    return span


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_has_a_span_in_its_clients_trace(kind: str) -> None:
    async with serving() as (channel, exporter):
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("data-bin", b"\xff"))
        current = await call(channel, kind, b"", metadata=metadata)
        span = await the_span(exporter)
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == f"{TRACE}-{PARENT}"
    assert current == span.context.span_id.to_bytes(8)
    assert span.name == f"test.Service/{kind}"
    attributes = dict(span.attributes or {})
    assert attributes.pop("user_agent.original")
    assert attributes == {
        "rpc.system": "grpc",
        "rpc.service": SERVICE,
        "rpc.method": kind,
        "network.peer.address": "127.0.0.1",
        "rpc.response.status_code": "OK",
        "rpc.grpc.status_code": 0,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("request_", "code", "status"),
    [
        (b"refusal", "NOT_FOUND", StatusCode.UNSET),
        (b"abort", "UNAVAILABLE", StatusCode.ERROR),
        (b"fault", "INTERNAL", StatusCode.ERROR),
        (b"wait", "DEADLINE_EXCEEDED", StatusCode.ERROR),
    ],
)
async def test_the_span_of_a_call_that_fails_has_its_status_alone(
    kind: str, request_: bytes, code: str, status: StatusCode
) -> None:
    async with serving() as (channel, exporter):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(channel, kind, request_, timeout=1 if request_ == b"wait" else 60)
        span = await the_span(exporter)
    assert raised.value.code().name == code
    attributes = dict(span.attributes or {})
    assert attributes["rpc.response.status_code"] == attributes["error.type"] == code
    assert attributes["rpc.grpc.status_code"] == grpc.StatusCode[code].value[0]
    assert (span.status.status_code, span.status.description) == (status, None)
    assert span.events == ()


async def test_calls_of_other_services_have_no_span() -> None:
    async with serving() as (channel, exporter):
        await call(channel, "Unary", b"", service="other.Service")
        await call(channel, "Unary", b"")
        await the_span(exporter)
