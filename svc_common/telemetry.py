"""OpenTelemetry tracing of a service: off, at no cost, unless an OTLP endpoint is configured."""

import logging
import math
import os
import re
import sys
import threading
from collections.abc import Sequence

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.re import parse_env_headers

from svc_common.call_spans import CallSpans
from svc_common.settings import BAD_SETTINGS

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_EXPORT_SECONDS = 3.0
_HEADER_NAME = re.compile("[a-z0-9_.-]+")  # of gRPC's metadata

_propagator = TraceContextTextMapPropagator()


def configure_tracing(role: str) -> None:
    """Exports spans to the OTLP endpoint of the environment, if there is one, as service `quire-<role>`.

    To be called once, before interceptors and tracers are made. If the collector is down, only spans are lost. Exits
    with BAD_SETTINGS where a variable OTEL_… has a bad value.
    """
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return
    try:
        _check_credentials()
        provider = TracerProvider(resource=Resource.create({SERVICE_NAME: f"quire-{role}"}))
        provider.add_span_processor(BoundedSpanProcessor(_export_seconds()))
    except (ValueError, InvalidCompressionValueException) as error:
        print(f"python -m {role}_svc: traces: {error}", file=sys.stderr)
        raise SystemExit(BAD_SETTINGS) from None
    trace.set_tracer_provider(provider)


def _check_credentials() -> None:
    """Raises ValueError, which names the variable, where OpenTelemetry or gRPC would log a credential."""
    endpoint, headers = _first_set(_ENDPOINTS), _first_set(_HEADERS)
    if "@" in os.environ.get(endpoint, ""):
        raise ValueError(f"{endpoint} must have no user or password, which gRPC does not send; use {_HEADERS[1]}")
    if not all(map(_is_header, os.environ.get(headers, "").split(","))):
        raise ValueError(f"{headers} must be name=value, separated by commas, with special characters percent-encoded")


def _first_set(names: Sequence[str]) -> str:
    """The first of the variables that has a value; the last one where none has."""
    return next((name for name in names if os.environ.get(name)), names[-1])


def _is_header(text: str) -> bool:
    """Whether a text is empty, or a header that can be sent."""
    parser_logger = logging.getLogger(parse_env_headers.__module__)
    parser_logger.disabled = True  # it would log the header
    try:
        parsed = parse_env_headers(text, liberal=True)
    finally:
        parser_logger.disabled = False
    if not parsed:
        return not text.strip()
    return all(
        _HEADER_NAME.fullmatch(name) and value.isascii() and value.isprintable() for name, value in parsed.items()
    )


def _export_seconds() -> float:
    """Seconds until an export fails. Raises ValueError."""
    name = _first_set(_TIMEOUTS)
    if not (value := os.environ.get(name)):
        return _EXPORT_SECONDS
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} is {value!r}: it must be a number of seconds above 0")
    return seconds


class BoundedSpanProcessor(BatchSpanProcessor):
    """Sends spans in batches, and ends within the time of an export, however many batches are left."""

    def __init__(self, export_seconds: float) -> None:
        super().__init__(OTLPSpanExporter(timeout=export_seconds))
        self._export_seconds = export_seconds

    def shutdown(self) -> None:
        give_up = threading.Timer(self._export_seconds, self.span_exporter.shutdown)
        give_up.start()
        super().shutdown()  # type: ignore[no-untyped-call]
        give_up.cancel()


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
    """Sends the spans that are still queued, and ends tracing. Blocks for the time of one export at most."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()
