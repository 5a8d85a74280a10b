"""An OpenTelemetry collector in the test's process. It keeps the spans that services export over OTLP."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from svc_common.server import bind, create_server


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`spans` holds (service name, span) in the order of export, `metadata` that of the last export."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, trace_pb2.Span]] = []
        self.metadata: dict[str, str | bytes] = {}

    async def Export(self, request: Any, context: Any) -> Any:
        """Keeps the exported spans."""
        self.metadata = dict(context.invocation_metadata())
        for resource_spans in request.resource_spans:
            attributes = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
            for scope_spans in resource_spans.scope_spans:
                self.spans += [(attributes["service.name"], span) for span in scope_spans.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """A running collector and its endpoint."""
    servicer = Collector()
    server = create_server(max_message_bytes=2**20)
    add_servicer: Callable[..., None] = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_servicer(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    await server.stop(None)
