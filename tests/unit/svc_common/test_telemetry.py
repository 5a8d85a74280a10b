"""Tracing is off without an endpoint; with one, spans reach a real collector in one trace."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from collector import Collector, collecting
from svc_common.telemetry import BoundedSpanProcessor, configure_tracing, context_from, traceparent_of, tracer

Refusal: TypeAlias = Callable[[str, str], str]

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"

SCRIPT = f"""
from svc_common.telemetry import *
from svc_common.telemetry import server_interceptors
configure_tracing("worker")
with tracer().start_as_current_span("decode", context=context_from("{TRACEPARENT}")) as span:
    span.set_attribute("tokens", 3)
print(traceparent_of(span) or "none", len(server_interceptors("x.Service")))
with tracer().start_as_current_span("open") as span:
    print(traceparent_of(span) or "none")
shutdown_tracing()
"""


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    async with collecting() as listening:
        yield listening


async def run_script(**variables: str) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, env=environment | variables, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().splitlines()


async def test_spans_reach_the_collector_under_the_callers_trace(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    first, inner = await run_script(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert first.endswith(" 1")  # an interceptor for the calls of a service
    assert [(service, span.name) for service, span in servicer.spans] == [
        ("quire-worker", "decode"),
        ("quire-worker", "open"),
    ]
    decode, opened = (span for _, span in servicer.spans)
    assert decode.trace_id.hex() == TRACE_ID
    assert decode.parent_span_id.hex() == "00f067aa0ba902b7"
    assert inner.startswith(f"00-{opened.trace_id.hex()}-{opened.span_id.hex()}-")


async def test_the_endpoint_for_traces_alone_turns_tracing_on(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    await run_script(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=endpoint)
    assert len(servicer.spans) == 2


async def test_without_an_endpoint_nothing_is_recorded() -> None:
    assert await run_script() == ["none 0", "none"]


async def test_a_collector_that_is_down_is_no_failure() -> None:
    lines = await run_script(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert len(lines) == 2


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Ends a service that exports traces by a variable's value, and returns what it says."""

    def refused(variable: str, value: str) -> str:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setenv(variable, value)
        with pytest.raises(SystemExit) as ended:
            configure_tracing("worker")
        assert ended.value.code == 2
        return capsys.readouterr().err

    return refused


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "3s"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "nan"),
    ],
)
def test_a_bad_timeout_ends_the_service_with_the_name_of_its_variable(
    variable: str, value: str, refusal: Refusal
) -> None:
    error = f"{variable} is '{value}': it must be a number of seconds above 0"
    assert refusal(variable, value) == f"python -m worker_svc: traces: {error}\n"


def test_a_bad_compression_ends_the_service_with_the_name_of_its_variable(refusal: Refusal) -> None:
    assert "OTEL_EXPORTER_OTLP_COMPRESSION" in refusal("OTEL_EXPORTER_OTLP_COMPRESSION", "zip")


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:sesame@127.0.0.1:9", "must have no user or password"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "user:sesame@127.0.0.1:9", "must have no user or password"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization: Bearer sesame", "must be name=value"),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", 'x=1,authorization="sesame"', "must be name=value"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=%C3%A9sesame", "must be name=value"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a~b=sesame", "must be name=value"),
    ],
)
def test_a_credential_that_would_be_logged_ends_the_service_with_the_name_of_its_variable(
    variable: str, value: str, error: str, refusal: Refusal, caplog: pytest.LogCaptureFixture
) -> None:
    said = refusal(variable, value)
    assert said.startswith(f"python -m worker_svc: traces: {variable} {error}")
    assert "sesame" not in said + caplog.text


async def test_headers_are_sent_with_spans(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    headers = " Authorization=Bearer sesame , x-scope=%61b,"
    await run_script(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_HEADERS=headers)
    assert len(servicer.spans) == 2
    assert servicer.metadata["authorization"] == "Bearer sesame"
    assert servicer.metadata["x-scope"] == "ab"


async def test_an_empty_timeout_is_the_default() -> None:
    assert await run_script(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_TIMEOUT="")


def test_an_end_waits_for_a_collector_no_longer_than_an_export_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    ended_by: list[threading.Thread] = []

    def export(*_: object) -> SpanExportResult:
        assert is_over.wait(60)
        return SpanExportResult.FAILURE

    def shutdown(*_: object) -> None:
        ended_by.append(threading.current_thread())
        is_over.set()

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    monkeypatch.setattr(OTLPSpanExporter, "shutdown", shutdown)
    provider = TracerProvider()
    provider.add_span_processor(BoundedSpanProcessor(0.01))
    provider.get_tracer("test").start_span("a").end()
    provider.shutdown()
    assert ended_by[0] is not threading.current_thread()


@pytest.mark.parametrize("bad", ["", "nonsense", f"00-{'0' * 32}-00f067aa0ba902b7-01"])
def test_a_bad_traceparent_has_no_context(bad: str) -> None:
    assert context_from(bad) is None


def test_a_span_that_is_not_recorded_has_no_traceparent() -> None:
    with tracer().start_as_current_span("x", context=context_from(TRACEPARENT)) as span:
        assert traceparent_of(span) == ""
