"""OpenTelemetry tracing of a service: off, at no cost, unless an OTLP endpoint is configured."""

import os
from collections.abc import Sequence

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from svc_common.call_spans import CallSpans

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORT_SECONDS = 3.0

_propagator = TraceContextTextMapPropagator()


def configure_tracing(role: str) -> None:
    """Exports spans to the OTLP endpoint of the environment, if there is one, as service `quire-<role>`.

    To be called once, before interceptors and tracers are made. If the collector is down, only spans are lost.
    """
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: f"quire-{role}"}))
    # Bounds how long shutdown_tracing waits for a collector that does not respond.
    seconds = float(os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT", _EXPORT_SECONDS))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=seconds)))
    trace.set_tracer_provider(provider)


def tracer() -> trace.Tracer:
    """The project's tracer; its spans do not record where tracing is off."""
    return trace.get_tracer("quire")


def server_interceptors(service: str) -> Sequence[grpc.aio.ServerInterceptor]:
    """The interceptor that makes spans for the calls of one service; none where tracing is off.

    For public calls: a span around an inner stream would last as long as the process.
    """
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        return ()
    return (CallSpans(service, tracer()),)


def context_from(traceparent: str) -> Context | None:
    """The context of a W3C traceparent, for `start_span(context=…)`; None where it is empty or not valid."""
    context = _propagator.extract({"traceparent": traceparent}, context=Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def traceparent_of(span: trace.Span) -> str:
    """The W3C traceparent by which other services continue this span; empty where it is not recorded."""
    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier["traceparent"]


def shutdown_tracing() -> None:
    """Sends the spans that are still queued, and ends tracing. Blocks for a few seconds at most."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()
