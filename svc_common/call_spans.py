"""A span for each call of a gRPC service, in its client's trace."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from svc_common.deadlines import CallDeadline
from svc_common.errors import QuireError
from svc_common.interceptors import Behavior, Context, Continuation, Handler, behavior_of, maker_of, send_responses

_CODES = {code.value[0]: code for code in grpc.StatusCode}

# The codes that are a server's failure. With any other the server did what it should.
_FAILURES = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


class CallSpans(grpc.aio.ServerInterceptor):
    """Spans by OpenTelemetry's conventions for gRPC.

    A span has the status of its call and no exception: the text of one may have parts of a prompt. During the call it
    is the current span.
    """

    def __init__(self, service: str, tracer: trace.Tracer) -> None:
        """`service` is the full name of the service whose calls have spans."""
        self._service = service
        self._tracer = tracer

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method[1:].partition("/")
        if handler is None or service != self._service:
            return handler
        behavior = behavior_of(handler)
        return maker_of(handler)(
            self._streaming(behavior, method) if handler.response_streaming else self._unary(behavior, method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _unary(self, behavior: Behavior, method: str) -> Behavior:
        async def respond(request: Any, context: Context) -> Any:
            with self._span(method, context):
                return await behavior(request, context)

        return respond

    def _streaming(self, behavior: Behavior, method: str) -> Behavior:
        async def respond(request: Any, context: Context) -> None:
            with self._span(method, context):
                await send_responses(behavior(request, context), context)

        return respond

    @contextmanager
    def _span(self, method: str, context: Context) -> Iterator[None]:
        metadata = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        attributes = {"rpc.system": "grpc", "rpc.service": self._service, "rpc.method": method}
        if "user-agent" in metadata:
            attributes["user_agent.original"] = metadata["user-agent"]
        if address := _address(context.peer()):
            attributes["network.peer.address"] = address
        with self._tracer.start_as_current_span(
            f"{self._service}/{method}",
            extract(metadata),
            SpanKind.SERVER,
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            deadline = CallDeadline(context)
            try:
                yield
            except BaseException as error:
                _set_code(span, _code_of(error, context, deadline))
                raise
            _set_code(span, grpc.StatusCode.OK)


def _code_of(error: BaseException, context: Context, deadline: CallDeadline) -> grpc.StatusCode:
    """The status of a call that a handler left with an exception."""
    if isinstance(error, QuireError):
        return error.code
    if isinstance(error, grpc.aio.AbortError):
        code = context.code()
        return _CODES.get(code, grpc.StatusCode.UNKNOWN) if isinstance(code, int) else code
    # A write after the client has left raises InternalError, if grpc has not cancelled the handler.
    if isinstance(error, asyncio.CancelledError | GeneratorExit | grpc.aio.InternalError):
        return deadline.code_of_departure()
    return grpc.StatusCode.INTERNAL


def _set_code(span: Span, code: grpc.StatusCode) -> None:
    span.set_attribute("rpc.response.status_code", code.name)
    span.set_attribute("rpc.grpc.status_code", code.value[0])  # its name in earlier conventions
    if code in _FAILURES:
        span.set_status(Status(StatusCode.ERROR))
    if code is not grpc.StatusCode.OK:
        span.set_attribute("error.type", code.name)


def _address(peer: str) -> str:
    """The address of a peer such as ipv4:127.0.0.1:57284 or ipv6:%5B::1%5D:57284; empty for other kinds."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return rest.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]")
