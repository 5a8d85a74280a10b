"""The HTTP API: OpenAI-style routes, health and metrics, over the request manager."""

import math
import time
from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, version

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from gateway_svc.auth import CREDENTIAL_HEADERS, Authenticator
from gateway_svc.field_paths import contract_field_path
from gateway_svc.openai_http.bodies import Body, Delivery, chat_body, completion_body
from gateway_svc.openai_http.cursor import LAST_EVENT_ID, Cursor
from gateway_svc.openai_http.endpoint import Handler, HttpEndpoint
from gateway_svc.openai_http.errors import NO_ROUTE
from gateway_svc.openai_http.exchange import HttpExchange
from gateway_svc.openai_http.hosts import AllowedHosts
from gateway_svc.openai_http.json_fields import JsonBody, parse_body
from gateway_svc.openai_http.responses import ChatFormat, CompletionFormat, Format, Json, ResponseBuilder
from gateway_svc.request_group import RequestGroup
from gateway_svc.request_manager import Call, RequestManager
from gateway_svc.tenant import Tenant
from gateway_svc.tenant_threads import TenantThreads
from gateway_svc.tracing import Operation
from gateway_svc.validated_request import ModelInfo
from gateway_svc.validation import is_request_id
from svc_common.errors import QuireError, Reason

_PING_SECONDS = 15.0
_MAX_TIMEOUT_SECONDS = 86_400.0
# A body of this size is parsed in about a millisecond, a larger one in a thread: one of 16 MiB takes up to 0.5 s.
_SMALL_BODY_BYTES = 32 * 2**10


class HttpHandlers:
    def __init__(
        self,
        request_manager: RequestManager,
        authenticator: Authenticator,
        hosts: AllowedHosts,
        origins: Collection[str],
        read_timeout: float,
    ) -> None:
        """`origins` are those of web pages that may use this API; `*` is all. A body has `read_timeout` seconds."""
        self._request_manager = request_manager
        self._authenticator = authenticator
        self._hosts = hosts
        self._origins = origins
        self._read_timeout = read_timeout
        # Two for one tenant, and one that it leaves to others.
        self._threads = TenantThreads(3, "parse")
        self._started_at = int(time.time())

    def app(self) -> ASGIApp:
        """The routes as an ASGI application."""
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/health", self.health),
            ("GET", "/live", self.live),
            ("GET", "/version", self.version),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.get_model),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat_completions),
        ]
        if not self._authenticator.requires_credential:  # else a tenant would see what others do
            routes.append(("GET", "/metrics", self.metrics))
        router = Router(
            [Route(spelling, self._endpoint(*route)) for route in routes for spelling in _spellings(route[1])],
            redirect_slashes=False,
            default=self._endpoint(None, "none", no_route),
        )
        if not self._origins:
            return router
        return CORSMiddleware(
            router,
            allow_origins=self._origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients add headers of their own, such as x-stainless-lang
            expose_headers=("x-request-id", "x-request-durable", "retry-after", "x-should-retry"),
        )

    def _endpoint(self, method: str | None, path: str, handle: Handler) -> HttpEndpoint:
        return HttpEndpoint(
            method, path, handle, self._request_manager.metrics, self._hosts, read_timeout=self._read_timeout
        )

    def close(self) -> None:
        self._threads.close()

    async def health(self, exchange: HttpExchange) -> None:
        """200 where a request would be accepted now; also whether it would survive its scheduler."""
        is_ready = self._request_manager.is_ready
        body = {"status": "ready" if is_ready else "not ready", "durable": self._request_manager.is_durable}
        await exchange.respond_json(body, 200 if is_ready else 503)

    async def live(self, exchange: HttpExchange) -> None:
        """200 as long as the process answers."""
        await exchange.respond_json({"status": "live"})

    async def metrics(self, exchange: HttpExchange) -> None:
        await exchange.respond(self._request_manager.metrics.exposition(), CONTENT_TYPE_LATEST)

    async def version(self, exchange: HttpExchange) -> None:
        """The version of this software."""
        self._tenant(exchange)
        await exchange.respond_json({"version": software_version()})

    async def models(self, exchange: HttpExchange) -> None:
        """The models that are ready, once for each of their names."""
        ready = self._request_manager.ready_models(self._tenant(exchange))
        cards = [self._model_json(name, info) for model, info in ready for name in model.names]
        await exchange.respond_json({"object": "list", "data": cards})

    async def get_model(self, exchange: HttpExchange) -> None:
        """One model that is ready."""
        tenant = self._tenant(exchange)
        name = exchange.path_params["model"]
        model = self._request_manager.catalog.find(name, contract_field_path, tenant)
        await exchange.respond_json(self._model_json(name, self._request_manager.model_info(model)))

    async def completions(self, exchange: HttpExchange) -> None:
        call = self._call(exchange, Operation.TEXT_COMPLETION)
        body = await self._read(exchange, call, completion_body)
        await self._generate(exchange, call, body, CompletionFormat())

    async def chat_completions(self, exchange: HttpExchange) -> None:
        call = self._call(exchange, Operation.CHAT)
        body = await self._read(exchange, call, chat_body)
        await self._generate(exchange, call, body, ChatFormat(body.calls))

    async def _read(self, exchange: HttpExchange, call: Call, read: Callable[[JsonBody, str | None], Body]) -> Body:
        data, name = await exchange.read_json(), _idempotency_key(exchange)
        if len(data) <= _SMALL_BODY_BYTES:
            return read(parse_body(data), name)
        return await self._threads.run(call.tenant.name, lambda: read(parse_body(data), name))

    async def _generate(self, exchange: HttpExchange, call: Call, body: Body, form: Format) -> None:
        request_manager = self._request_manager
        first = body.prompts[0]
        model = request_manager.catalog.find(first.unvalidated.model, first.field_path, call.tenant)
        exchange.model = model.name
        generations = [
            await request_manager.validate(call, model, one.unvalidated, one.field_path, exchange.request_id)
            for one in body.prompts
        ]
        n = generations[0].n
        cursor = _cursor(exchange, body.delivery, len(generations) * n)
        with request_manager.run(call, generations, cursor.resume_positions(n) if cursor else ()) as group:
            async with exchange.watch_disconnect(group.client_disconnected):
                await group.accepted()
                exchange.is_durable = group.is_durable
                answer = ResponseBuilder(form, group.renderings, group.vocabulary, int(time.time()), cursor)
                if body.delivery is Delivery.WHOLE:
                    chunks = await group.all()
                    await exchange.respond_json(answer.whole(chunks, group.usage))
                else:
                    await _stream(exchange, answer, group, body.delivery)

    def _call(self, exchange: HttpExchange, operation: Operation) -> Call:
        return Call(self._tenant(exchange), operation, _deadline(exchange), exchange.context)

    def _tenant(self, exchange: HttpExchange) -> Tenant:
        values = ((name, exchange.header(name)) for name in CREDENTIAL_HEADERS)
        credentials = [(name, value) for name, value in values if value is not None]
        return self._authenticator.login(credentials, "http", exchange.peer)

    def _model_json(self, name: str, info: ModelInfo) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "quire",
            # As in vLLM.
            "root": info.name,
            "max_model_len": info.context_length,
        }


def _spellings(path: str) -> list[str]:
    """A route's path, with and without a slash at the end."""
    # A parameter at the end of a path is a name of any length: the slash would be a part of it.
    return [path] if path.endswith("}") else [path, f"{path}/"]


async def no_route(exchange: HttpExchange) -> None:
    """Answers paths that are not a route."""
    await exchange.send_error(NO_ROUTE)


def software_version() -> str:
    """The installed version, or a version for a source tree that is not installed."""
    try:
        return version("quire")
    except PackageNotFoundError:
        return "0+source"


async def _stream(exchange: HttpExchange, answer: ResponseBuilder, group: RequestGroup, delivery: Delivery) -> None:
    await exchange.start_events()
    async with exchange.keep_alive(_PING_SECONDS):
        while chunks := await group.next():
            # All events of a step are sent at once.
            if events := b"".join([answer.event(prompt_index, chunk) for prompt_index, chunk in chunks]):
                await exchange.send_events(events)
    usage = group.usage if delivery is Delivery.STREAM_WITH_USAGE else None
    await exchange.end_events(answer.last_events(usage))


def _idempotency_key(exchange: HttpExchange) -> str | None:
    """The client's own id of the request, which is also the reply's."""
    name = exchange.header("Idempotency-Key")
    if name is not None and is_request_id(name):
        exchange.request_id = name
    return name


def _cursor(exchange: HttpExchange, delivery: Delivery, num_choices: int) -> Cursor | None:
    """Where a stream begins that can be resumed: one whose client named it."""
    last_event_id = exchange.header(LAST_EVENT_ID)
    is_lasting = delivery is not Delivery.WHOLE and "idempotency-key" in exchange.headers
    if last_event_id is None:
        return Cursor(num_choices) if is_lasting else None
    if not is_lasting:
        message = "continues a stream that has an Idempotency-Key"
        raise QuireError(Reason.INVALID_FIELD, message, field=LAST_EVENT_ID)
    return Cursor.parse(last_event_id, num_choices)


def _deadline(exchange: HttpExchange) -> float | None:
    """The client's deadline on the monotonic clock, in seconds."""
    header = exchange.header("x-request-timeout")
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        message = f"must be a number of seconds, above 0 and at most {_MAX_TIMEOUT_SECONDS:g}"
        raise QuireError(Reason.INVALID_FIELD, message, field="x-request-timeout")
    return time.monotonic() + seconds
