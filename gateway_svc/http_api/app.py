"""The HTTP API as an ASGI application: the routes of every protocol, over the request manager."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway_svc.auth import Authenticator
from gateway_svc.call_limits import CallLimits
from gateway_svc.http_api.anthropic.errors import ANTHROPIC_ERRORS
from gateway_svc.http_api.anthropic.routes import AnthropicRoutes
from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.classifying.routes import ClassifyingRoutes
from gateway_svc.http_api.document_routes import DocumentRoutes
from gateway_svc.http_api.embeddings.cohere_routes import CohereEmbedRoutes
from gateway_svc.http_api.embeddings.routes import EmbeddingsRoutes
from gateway_svc.http_api.endpoint import ANY_METHOD, HttpEndpoint, HttpRoute
from gateway_svc.http_api.errors import NO_ROUTE, ErrorFormat
from gateway_svc.http_api.exchange import OWN_ID_HEADER, REQUEST_ID_HEADER, HttpExchange
from gateway_svc.http_api.hosts import AllowedHosts
from gateway_svc.http_api.ollama.errors import OLLAMA_ERRORS
from gateway_svc.http_api.ollama.routes import OllamaRoutes
from gateway_svc.http_api.openai.answer_models import ErrorAnswer
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from gateway_svc.http_api.openai.routes import OpenAiRoutes
from gateway_svc.http_api.responses.routes import ResponsesRoutes
from gateway_svc.http_api.sagemaker.routes import SageMakerRoutes
from gateway_svc.http_api.scoring.routes import ScoringRoutes
from gateway_svc.http_api.service_routes import ServiceRoutes
from gateway_svc.http_api.tokenizing.routes import TokenizingRoutes
from gateway_svc.http_api.undefined_fields import IGNORED_FIELDS_HEADER, UndefinedFields
from gateway_svc.http_api.websocket_endpoint import WebSocketEndpoint, handshake
from gateway_svc.request_manager import RequestManager
from gateway_svc.settings import BadSetting
from gateway_svc.tenant_threads import TenantThreads

_WEBSOCKET_PATHS = ("/v1/chat/completions", "/v1/completions")

_ERRORS_BELOW: Mapping[str, ErrorFormat] = {"/api": OLLAMA_ERRORS, "/v1/messages": ANTHROPIC_ERRORS}
"""The format of errors for paths that are not a route, below those of an API whose format is not OpenAI's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """What an operator sets for all routes.

    `origins` are those of web pages that may use this API; `*` is all. A body has `read_timeout` seconds. Paths may
    begin with `root_path`. With `always_has_usage` every stream of chats and completions has its usage, also so far;
    with `names_tokens_by_id` their log-probabilities have token_id:N for a token's text, unless a request says.
    """

    read_timeout: float
    undefined_fields: UndefinedFields
    origins: Collection[str] = ()
    root_path: str = ""
    always_has_usage: bool = False
    names_tokens_by_id: bool = False


class HttpApi:
    """`routes` are those of all protocols."""

    def __init__(
        self,
        request_manager: RequestManager,
        authenticator: Authenticator,
        hosts: AllowedHosts,
        threads: TenantThreads,
        options: HttpOptions,
        limits: CallLimits,
    ) -> None:
        """`threads` are for long work."""
        self._metrics = request_manager.metrics
        self._hosts = hosts
        self._options = options
        self._calls = HttpCalls(request_manager, authenticator, options.undefined_fields, threads, limits)
        service = ServiceRoutes(request_manager, self._calls, OPENAI_ERRORS, ErrorAnswer)
        openai = OpenAiRoutes(
            request_manager,
            self._calls,
            always_has_usage=options.always_has_usage,
            names_tokens_by_id=options.names_tokens_by_id,
        )
        embeddings, scoring = EmbeddingsRoutes(self._calls), ScoringRoutes(self._calls)
        classifying = ClassifyingRoutes(self._calls)
        by_field = {
            "messages": openai.chat_completions,
            "prompt": openai.completions,
            "input": embeddings.embeddings,
            "query": scoring.rerank,
            **dict.fromkeys(("queries", "text_1", "data_1"), scoring.score),
        }
        openai_routes = [
            *openai.routes(),
            *embeddings.routes(),
            *ResponsesRoutes(request_manager, self._calls).routes(),
        ]
        routes: list[HttpRoute] = [
            # With keys there are no metrics: a tenant would see what others do.
            *service.routes(has_metrics=not authenticator.requires_credential),
            *(replace(route, has_unversioned_path=True) for route in openai_routes),
            *CohereEmbedRoutes(self._calls).routes(),
            *classifying.routes(),
            *scoring.routes(),
            *SageMakerRoutes(
                request_manager.catalog, self._calls, service.health, by_field, classifying.classify
            ).routes(),
            *AnthropicRoutes(self._calls).routes(),
            *OllamaRoutes(request_manager, self._calls).routes(),
            *TokenizingRoutes(request_manager, self._calls).routes(),
        ]
        root_path = options.root_path
        document = DocumentRoutes(
            routes,
            OPENAI_ERRORS,
            ErrorAnswer,
            requires_credential=authenticator.requires_credential,
            root_path=root_path,
        )
        self.routes = [*routes, *document.routes()]
        if root_path and any(f"{path}/".startswith(f"{root_path}/") for route in self.routes for path in route.paths):
            raise BadSetting(f"QUIRE_ROOT_PATH: {root_path} is the beginning of a route")

    def app(self) -> ASGIApp:
        """The routes as an ASGI application."""
        endpoints = [(route, self._endpoint(route)) for route in self.routes]
        router = Router(
            [
                *(Route(path, endpoint) for route, endpoint in endpoints for path in _spellings(route)),
                *(
                    WebSocketRoute(path, self._websocket_endpoint(endpoint))
                    for route, endpoint in endpoints
                    if route.path in _WEBSOCKET_PATHS
                    for path in _spellings(route)
                ),
                *(Route(f"{path}/{{rest:path}}", self._no_route(errors)) for path, errors in _ERRORS_BELOW.items()),
            ],
            redirect_slashes=False,
            default=_NoRoute(self._no_route(OPENAI_ERRORS)),
        )
        root_path, origins = self._options.root_path, self._options.origins
        app = _RootPathApp(router, root_path) if root_path else _ExactPathApp(router, endpoints)
        if not origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=sorted({method for route in self.routes for method in route.handlers}),
            allow_headers=("*",),  # clients add headers of their own, such as x-stainless-lang
            expose_headers=(
                REQUEST_ID_HEADER,
                OWN_ID_HEADER,
                "x-request-durable",
                "retry-after",
                "x-should-retry",
                IGNORED_FIELDS_HEADER,
            ),
        )

    def _websocket_endpoint(self, post: ASGIApp) -> WebSocketEndpoint:
        origins = self._options.origins
        return WebSocketEndpoint(post, self._calls, self._hosts, origins, OPENAI_ERRORS, self._metrics.refuse)

    def _no_route(self, errors: ErrorFormat) -> HttpEndpoint:
        return self._endpoint(HttpRoute("none", {ANY_METHOD: no_route}, errors))

    def _endpoint(self, route: HttpRoute) -> HttpEndpoint:
        return HttpEndpoint(route, self._metrics, self._hosts, read_timeout=self._options.read_timeout)


def _spellings(route: HttpRoute) -> Iterator[str]:
    """A route's paths, each with and without a slash at the end."""
    for path in route.paths:
        yield path
        # A parameter at the end of a path is a name of any length: the slash would be a part of it.
        if not path.endswith("}"):
            yield f"{path}/"


class _ExactPathApp:
    """Finds routes without parameters by their paths: the router compares a path with one route after the other."""

    def __init__(self, router: ASGIApp, endpoints: Iterable[tuple[HttpRoute, ASGIApp]]) -> None:
        """`router` has all routes, and those of WebSockets."""
        self._router = router
        self._endpoints: dict[str, ASGIApp] = {}
        for route, endpoint in endpoints:
            for path in _spellings(route) if "{" not in route.path else ():
                self._endpoints.setdefault(path, endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        await (endpoint or self._router)(scope, receive, send)


class _RootPathApp:
    """Routes whose paths may begin with a root path."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._root_path}, receive, send)


class _NoRoute:
    """Answers paths that are not a route."""

    def __init__(self, endpoint: ASGIApp) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await no_route(handshake(scope, receive, send, OPENAI_ERRORS))
        else:
            await self._endpoint(scope, receive, send)


async def no_route(exchange: HttpExchange) -> None:
    """Says that a path is not a route."""
    await exchange.send_error(NO_ROUTE)
