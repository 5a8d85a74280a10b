"""The spans that a gateway makes of calls over gRPC and HTTP."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway_calls import asking, refused
from gateway_harness import MODEL, Harness, encoded, running_gateway
from quire.inference.v1 import inference_pb2 as api
from quire.open_inference.v2 import open_inference_pb2 as open_inference
from quire.open_inference.v2.open_inference_pb2_grpc import GRPCInferenceServiceStub
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import answer_with
from tiny_model import EOS

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collects the finished spans. Tracing is on as with an endpoint."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


@pytest.fixture
async def quire(exporter: InMemorySpanExporter, model_directory: Path) -> AsyncIterator[Harness]:
    async with running_gateway(model_directory) as harness:
        yield harness


async def finished(exporter: InMemorySpanExporter, number: int) -> list[ReadableSpan]:
    """The spans, those of calls first, once there are so many: a call's span ends after its client knows the end."""
    async with asyncio.timeout(60):
        while len(spans := exporter.get_finished_spans()) < number:
            await asyncio.sleep(0.01)
    return sorted(spans, key=lambda span: span.kind is not SpanKind.SERVER)


async def test_the_span_of_a_refused_call_has_its_status_and_no_stack_trace(
    quire: Harness, exporter: InMemorySpanExporter
) -> None:
    await refused(quire.stub.StreamGenerate(asking(n=1000)))
    await refused(quire.stub.Generate(api.GenerateRequest(generation=asking(n=1000).generation)))
    for span in await finished(exporter, 2):
        assert span.events == ()
        assert (span.attributes or {})["rpc.response.status_code"] == "INVALID_ARGUMENT"
        assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("timeout", "code", "status"),
    [(None, "CANCELLED", StatusCode.UNSET), (2.0, "DEADLINE_EXCEEDED", StatusCode.ERROR)],
)
async def test_the_span_of_a_call_whose_client_leaves_has_its_status(
    timeout: float | None, code: str, status: StatusCode, quire: Harness, exporter: InMemorySpanExporter
) -> None:
    call = quire.stub.StreamGenerate(asking(), timeout=timeout)
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    await call.read()
    if timeout is None:
        call.cancel()
    assert await call.code() is grpc.StatusCode[code]
    server, generation = await finished(exporter, 2)
    assert (server.attributes or {})["rpc.response.status_code"] == code
    assert server.status.status_code is status
    assert server.events == ()
    # At the deadline the gateway may end the request before it learns that the client has left.
    assert (generation.attributes or {})["error.type"] in {"CANCELLED", code}


async def test_the_only_token_of_a_request_is_measured_before_its_span_ends(
    quire: Harness, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    quire.scheduler.script = answer_with(encoded("hello"))
    with caplog.at_level(logging.WARNING, "opentelemetry"):
        await quire.stub.Generate(api.GenerateRequest(generation=asking().generation))
        server, generation = await finished(exporter, 2)
    assert caplog.messages == []
    assert (generation.attributes or {})["gen_ai.response.time_to_first_chunk"]
    assert (server.name, server.kind) == ("quire.inference.v1.InferenceService/Generate", SpanKind.SERVER)
    assert (server.attributes or {})["network.peer.address"] == "127.0.0.1"
    assert generation.parent is not None
    assert server.context is not None
    assert generation.parent.span_id == server.context.span_id


async def test_requests_of_a_stream_are_in_the_trace_of_its_caller(
    quire: Harness, exporter: InMemorySpanExporter
) -> None:
    quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
    request = open_inference.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    call = GRPCInferenceServiceStub(quire.channel).ModelStreamInfer(
        iter([request, request]), metadata=(("traceparent", f"00-{trace_id}-{parent}-01"),)
    )
    assert not any([response.error_message async for response in call])
    server, *generations = await finished(exporter, 3)
    assert server.name == "inference.GRPCInferenceService/ModelStreamInfer"
    assert server.parent is not None
    assert (server.parent.trace_id, server.parent.span_id) == (int(trace_id, 16), int(parent, 16))
    assert [span.name for span in generations] == [f"text_completion {MODEL}"] * 2
    assert all(span.parent == server.context for span in generations)


@pytest.mark.parametrize(("has_parent", "num_spans"), [(True, 1), (False, 0)])
async def test_a_get_joins_the_trace_of_its_caller(
    has_parent: bool, num_spans: int, quire: Harness, exporter: InMemorySpanExporter
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"} if has_parent else {}
    assert (await quire.http.get("/v1/responses/resp_unknown", headers=headers)).status_code == 404
    spans = await finished(exporter, num_spans)
    assert [span.name for span in spans] == ["GET /v1/responses/{response_id}"] * num_spans
    assert all(span.context is not None and span.context.trace_id == int(trace_id, 16) for span in spans)


async def test_a_traceparent_that_is_there_twice_is_ignored(quire: Harness, exporter: InMemorySpanExporter) -> None:
    trace_ids = ["0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"]
    headers = [("traceparent", f"00-{trace_id}-b7ad6b7169203331-01") for trace_id in trace_ids]
    assert (await quire.http.post("/tokenize", json={"prompt": "a"}, headers=headers)).status_code == 200
    (span,) = await finished(exporter, 1)
    assert span.parent is None


async def test_the_span_of_an_http_call_that_fails_has_the_attributes_of_the_conventions(
    quire: Harness, exporter: InMemorySpanExporter
) -> None:
    reason = scheduler_v1.FAILURE_REASON_UNAVAILABLE
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason, "why")
    body = {"messages": MESSAGES}
    response = await quire.http.post("/v1/chat/completions", json=body, headers={"user-agent": "a client"})
    assert response.status_code == 503
    server, _ = await finished(exporter, 2)
    assert server.status.status_code is StatusCode.ERROR
    assert dict(server.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.scheme": "http",
        "url.path": "/v1/chat/completions",
        "user_agent.original": "a client",
        "network.peer.address": "127.0.0.1",
        "http.response.status_code": 503,
        "error.type": "503",
    }


async def test_the_span_of_a_refused_http_call_has_its_status_and_no_stack_trace(
    quire: Harness, exporter: InMemorySpanExporter
) -> None:
    refused_body = {"messages": MESSAGES, "n": 1000}
    assert (await quire.http.post("/v1/chat/completions", json=refused_body)).status_code == 400
    (span,) = await finished(exporter, 1)
    assert (span.name, span.events) == ("POST /v1/chat/completions", ())
    assert (span.attributes or {})["http.response.status_code"] == 400
    assert span.status.status_code is StatusCode.UNSET


async def test_the_span_of_a_stream_whose_http_client_leaves_has_no_stack_trace(
    quire: Harness, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    async def begin() -> None:
        key = (await quire.scheduler.next("submit")).key
        quire.scheduler.session.accept(key)
        quire.scheduler.session.tokens(key, encoded("hello there"), 0)

    body = {"messages": MESSAGES, "stream": True}
    with caplog.at_level(logging.WARNING):
        begun = asyncio.create_task(begin())
        async with quire.http.stream("POST", "/v1/chat/completions", json=body) as response:
            await anext(response.aiter_lines())
        await begun
        server, generation = await finished(exporter, 2)
    assert caplog.messages == []
    assert (server.events, generation.events) == ((), ())
    assert server.status.status_code is StatusCode.UNSET
    assert (generation.attributes or {})["error.type"] == "CANCELLED"


async def test_the_only_token_of_an_http_call_is_measured_before_its_span_ends(
    quire: Harness, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    quire.scheduler.script = answer_with(encoded("hello"))
    with caplog.at_level(logging.WARNING, "opentelemetry"):
        body = {"messages": MESSAGES, "max_tokens": 1}
        assert (await quire.http.post("/v1/chat/completions", json=body)).status_code == 200
        server, generation = await finished(exporter, 2)
    assert caplog.messages == []
    assert (generation.attributes or {})["gen_ai.response.time_to_first_chunk"]
    assert (server.attributes or {})["http.response.status_code"] == 200
    assert generation.parent is not None
    assert server.context is not None
    assert generation.parent.span_id == server.context.span_id
