"""What every HTTP handler has in common: metrics, the request's span, and errors in the format of its protocol."""

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from gateway_svc.http_api.answer_model import AnswerModel
from gateway_svc.http_api.body_model import BodyModel
from gateway_svc.http_api.errors import WRONG_METHOD, ErrorFormat, HttpError, HttpRejection
from gateway_svc.http_api.exchange import CLIENT_DISCONNECTED, HttpExchange
from gateway_svc.http_api.hosts import AllowedHosts
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.refusals import refusal_of, refusal_of_http
from gateway_svc.request_group import ClientDisconnected
from svc_common.errors import QuireError, Reason
from svc_common.telemetry import context_from, tracer

logger = logging.getLogger("quire.gateway")

ANY_METHOD = "*"

CALL_HEADERS = ("x-request-timeout", "x-request-id", "traceparent")
GENERATION_HEADERS = ("Idempotency-Key", *CALL_HEADERS)
RESUMABLE_HEADERS = ("Idempotency-Key", "Last-Event-ID", *CALL_HEADERS)

Handler = Callable[[HttpExchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HandlerDoc:
    """What the API's document says of a handler, beside its docstring: the models of the body, of the answer, of the
    data of a stream's events, and of errors. Several models are alternatives."""

    body: type[BodyModel] | tuple[type[BodyModel], ...] | None = None
    answer: type[BaseModel] | tuple[type[BaseModel], ...] | None = None
    event: type[AnswerModel] | tuple[type[AnswerModel], ...] | None = None
    error: type[AnswerModel] | None = None
    needs_credential: bool = True
    query: Mapping[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)
    """Parameters of the query, each with its schema and a description."""
    headers: Sequence[str] = CALL_HEADERS
    """Headers that are read, of a handler with a body."""
    content_type: str = "application/json"
    event_type: str = "text/event-stream"
    other_statuses: Mapping[str, str] = field(default_factory=dict)
    """Statuses beside 200 that have the same body, each with a description."""


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A path, as Starlette writes it, with its handlers by method. Metrics and spans have the path as a label."""

    path: str
    handlers: Mapping[str, Handler]
    errors: ErrorFormat
    docs: Mapping[str, HandlerDoc] = field(default_factory=dict)
    has_unversioned_path: bool = False
    """Whether the route also has its path without `/v1`."""
    takes_any_type: bool = False
    """Whether a body may have any Content-Type, unless a web page sends it."""

    @property
    def paths(self) -> Sequence[str]:
        """All paths of the route; `path` is the first."""
        return (self.path, self.path.removeprefix("/v1")) if self.has_unversioned_path else (self.path,)

    def handler(self, method: str) -> Handler | None:
        """The handler for a method. HEAD is answered as GET; the server leaves the body out."""
        return self.handlers.get("GET" if method == "HEAD" else method, self.handlers.get(ANY_METHOD))


class HttpEndpoint:
    """An ASGI application for one route."""

    def __init__(self, route: HttpRoute, metrics: GatewayMetrics, hosts: AllowedHosts, *, read_timeout: float) -> None:
        self._route = route
        self._metrics = metrics
        self._hosts = hosts
        self._read_timeout = read_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(
            scope,
            receive,
            send,
            self._read_timeout,
            self._route.errors,
            takes_any_type=self._route.takes_any_type,
        )
        method = scope["method"]
        try:
            with self._metrics.call("http", self._route.path, str(CLIENT_DISCONNECTED)) as outcome:
                # Probes and lists of models have no span of their own, unless they are part of a caller's trace.
                if method in self._route.handlers and (method == "POST" or "traceparent" in exchange.headers):
                    await self._traced(exchange, method, scope)
                else:
                    await self._guarded(exchange, method)
                outcome.code = str(exchange.outcome)
                outcome.model = exchange.model
            await exchange.drain()  # an answer that its client does not read takes memory
        finally:
            exchange.end()
        if exchange.ignored_fields:
            self._metrics.ignored_fields.labels(self._route.path).inc(len(exchange.ignored_fields))

    async def _traced(self, exchange: HttpExchange, method: str, scope: Scope) -> None:
        """Handles the request within a span of the caller's trace, which is never the current span."""
        traceparents = exchange.headers.getlist("traceparent")
        span = tracer().start_span(
            f"{method} {self._route.path}",
            context=context_from(traceparents[0]) if len(traceparents) == 1 else None,
            kind=SpanKind.SERVER,
        )
        if span.is_recording():
            span.set_attributes(_attributes(exchange, method, self._route.path, scope))
        exchange.context = trace.set_span_in_context(span)
        try:
            await self._guarded(exchange, method)
        finally:
            span.set_attribute("http.response.status_code", exchange.status or CLIENT_DISCONNECTED)
            if exchange.outcome >= 500:
                span.set_attribute("error.type", str(exchange.outcome))
                span.set_status(Status(StatusCode.ERROR))
            span.end()

    async def _guarded(self, exchange: HttpExchange, method: str) -> None:
        try:
            self._hosts.check(exchange.header("Host"))
            handle = self._route.handler(method)
            if handle is None:
                await exchange.send_error(replace(WRONG_METHOD, allow=", ".join(self._route.handlers)))
            else:
                await handle(exchange)
        except QuireError as error:
            if (refusal := refusal_of(error)) is not None:
                self._metrics.refuse("http", refusal)
            await exchange.send_error(HttpError.of(error))
        except HttpRejection as rejection:
            if (refusal := refusal_of_http(rejection.error.code)) is not None:
                self._metrics.refuse("http", refusal)
            await exchange.send_error(rejection.error)
        except ClientDisconnected:
            exchange.client_disconnected()
        except Exception:
            error_id = uuid.uuid4().hex
            logger.exception("internal error", extra={"error_id": error_id, "route": self._route.path})
            await exchange.send_error(HttpError.of(QuireError(Reason.INTERNAL, f"internal error {error_id}")))


def _attributes(exchange: HttpExchange, method: str, route: str, scope: Scope) -> dict[str, str]:
    """Attributes of a call's span by OpenTelemetry's conventions for HTTP. The query is left out: it may hold keys."""
    attributes = {
        "http.request.method": method,
        "http.route": route,
        "url.scheme": scope["scheme"],
        "url.path": scope["path"],
    }
    if "user-agent" in exchange.headers:
        attributes["user_agent.original"] = exchange.headers["user-agent"]
    client = scope.get("client")
    if client and client[0]:  # a client of a Unix socket has none
        attributes["network.peer.address"] = client[0]
    return attributes
