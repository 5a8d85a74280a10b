"""What every HTTP handler has in common: metrics, the request's span, and errors in OpenAI's shape."""

import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.types import Receive, Scope, Send

from gateway_svc.metrics import GatewayMetrics
from gateway_svc.openai_http.errors import WRONG_METHOD, HttpError, HttpRejection
from gateway_svc.openai_http.exchange import HttpExchange
from gateway_svc.openai_http.hosts import AllowedHosts
from gateway_svc.request_group import ClientDisconnected
from svc_common.errors import QuireError, Reason
from svc_common.telemetry import context_from, tracer

logger = logging.getLogger("quire.gateway")

_CLIENT_DISCONNECTED = 499

Handler = Callable[[HttpExchange], Awaitable[None]]


class HttpEndpoint:
    """An ASGI application around one handler."""

    def __init__(
        self,
        method: str | None,
        route: str,
        handle: Handler,
        metrics: GatewayMetrics,
        hosts: AllowedHosts,
        *,
        read_timeout: float,
    ) -> None:
        """`route` labels metrics and spans. With `method` None any method is accepted."""
        self._method = method
        self._route = route
        self._handle = handle
        self._metrics = metrics
        self._hosts = hosts
        self._read_timeout = read_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send, self._read_timeout)
        with self._metrics.call("http", self._route, str(_CLIENT_DISCONNECTED)) as outcome:
            if self._method == "POST":
                await self._traced(exchange, scope["method"])
            else:
                await self._guarded(exchange, scope["method"])
            outcome.code = str(exchange.status or _CLIENT_DISCONNECTED)
            outcome.model = exchange.model

    async def _traced(self, exchange: HttpExchange, method: str) -> None:
        """Handles the request within a span of the caller's trace, which is never the current span."""
        span = tracer().start_span(
            f"{self._method} {self._route}",
            context=context_from(exchange.headers.get("traceparent", "")),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": self._method or "", "http.route": self._route},
        )
        exchange.context = trace.set_span_in_context(span)
        try:
            await self._guarded(exchange, method)
        finally:
            status = exchange.status or _CLIENT_DISCONNECTED
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            span.end()

    async def _guarded(self, exchange: HttpExchange, method: str) -> None:
        try:
            self._hosts.check(exchange.header("Host"))
            if self._takes(method):
                await self._handle(exchange)
            else:
                await exchange.send_error(replace(WRONG_METHOD, allow=self._method))
        except QuireError as error:
            await exchange.send_error(HttpError.of(error))
        except HttpRejection as rejection:
            await exchange.send_error(rejection.error)
        except ClientDisconnected:
            pass
        except Exception:
            error_id = uuid.uuid4().hex
            logger.exception("internal error", extra={"error_id": error_id, "route": self._route})
            await exchange.send_error(HttpError.of(QuireError(Reason.INTERNAL, f"internal error {error_id}")))

    def _takes(self, method: str) -> bool:
        return self._method in (None, method) or (self._method, method) == ("GET", "HEAD")
