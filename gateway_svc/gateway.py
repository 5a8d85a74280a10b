"""A gateway process from start to stop: two listeners over one request manager and one session."""

import asyncio
import logging
import os
import signal

import grpc
from starlette.types import ASGIApp

from gateway_svc.auth import Authenticator
from gateway_svc.call_limits import CallLimits
from gateway_svc.failed_logins import FailedLogins
from gateway_svc.grpc_admission import GrpcAdmission
from gateway_svc.grpc_calls import GrpcCalls
from gateway_svc.http_api.app import HttpApi, HttpOptions
from gateway_svc.http_api.connection import BoundedConfig, allow_open_files
from gateway_svc.http_api.connection_limits import ConnectionLimits
from gateway_svc.http_api.exchange import MAX_BODY_BYTES
from gateway_svc.http_api.hosts import AllowedHosts
from gateway_svc.http_api.listener import HttpListener
from gateway_svc.http_api.server import HttpServer
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.model_catalog import ModelCatalog
from gateway_svc.open_inference.servicer import SERVICE as OPEN_INFERENCE_SERVICE
from gateway_svc.open_inference.servicer import OpenInferenceServicer
from gateway_svc.request_manager import RequestManager
from gateway_svc.servicer import SERVICE, InferenceServicer
from gateway_svc.session import SchedulerSession
from gateway_svc.settings import GatewaySettings
from gateway_svc.tenant_threads import TenantThreads
from quire.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from quire.open_inference.v2.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from svc_common.files import keep_refreshed, refresh_once
from svc_common.inner_ports import check_dialled, identity_of
from svc_common.metrics import MetricsServer, serve_metrics
from svc_common.request_gate import RequestGate, StreamGate
from svc_common.server import PUBLIC_MESSAGE_BYTES, HealthReporter, bind, create_server, enable_reflection
from svc_common.service_roles import ServiceRole
from svc_common.telemetry import server_interceptors
from svc_common.tls_files import TlsFiles, grpc_server_credentials, http_server_context

logger = logging.getLogger("quire.gateway")

# Time for responses that are already written to reach their clients.
_CLOSE_SECONDS = 2.0
_WEBSOCKET_PING_SECONDS = 20.0  # between pings of the gateway
_WEBSOCKET_PONG_SECONDS = 60.0  # for the client's answer
_KEEP_ALIVE_SECONDS = 75
_ISSUER_SECONDS = 5.0  # at start, for the first keys of a token issuer
_GRPC_IDLE_SECONDS = 300  # a connection without calls is closed; channels connect again for the next call
_MAX_STREAMS = 4096  # of one gRPC connection; a client's further calls wait


class Gateway:
    """Its listeners. `http_port`, `grpc_port` and `metrics_port` are those in use."""

    def __init__(self, settings: GatewaySettings, catalog: ModelCatalog) -> None:
        """Binds the ports. Raises BadSetting, CannotListen and InvalidCredentials."""
        identity = identity_of(ServiceRole.GATEWAY, settings)
        check_dialled(identity, settings.scheduler_addresses, "QUIRE_SCHEDULERS_AT")
        self._key_file = settings.key_file()
        self._drain_grace = settings.drain_grace
        self._catalog = catalog
        self._changed = asyncio.Event()
        self._session = SchedulerSession(
            [str(address) for address in settings.scheduler_addresses],
            catalog.fingerprints,
            self._changed.set,
            settings.scheduler_patience,
            identity.outbound(ServiceRole.SCHEDULER),
        )
        metrics = GatewayMetrics([model.name for model in catalog])
        self._request_manager = RequestManager(catalog, self._session, metrics, settings.retention_rules)
        authenticator = Authenticator(self._key_file, FailedLogins(metrics.failed_logins))
        # Two for one tenant, and one that it leaves to others.
        self._threads = TenantThreads(3, "long-work")
        bodies = settings.body_shares()
        hosts = AllowedHosts.for_listener(None if settings.uds else settings.host, settings.allowed_host_patterns)
        http_api = HttpApi(
            self._request_manager,
            authenticator,
            hosts,
            self._threads,
            _http_options(settings),
            CallLimits(settings.call_shares(settings.max_http_connections), bodies),
        )
        grpc_limits = CallLimits(settings.call_shares(settings.max_grpc_connections), bodies)
        slow_messages = settings.slow_message_shares()
        calls = GrpcCalls(self._request_manager, authenticator, self._threads, grpc_limits, slow_messages)
        admission = GrpcAdmission(calls.counted_tenant, grpc_limits, slow_messages, metrics)
        self._grpc = _grpc_server(settings, calls, admission)
        add_InferenceServiceServicer_to_server(InferenceServicer(self._request_manager, calls), self._grpc)
        add_GRPCInferenceServiceServicer_to_server(OpenInferenceServicer(self._request_manager, calls), self._grpc)
        services = [SERVICE, OPEN_INFERENCE_SERVICE]
        self._health = HealthReporter(self._grpc, services, settings.max_grpc_connections)
        enable_reflection(self._grpc, services)
        tls = settings.tls_files()
        credentials = grpc_server_credentials(tls, requires_certificate=False) if tls else None
        self.grpc_port = bind(self._grpc, settings.host, settings.grpc_port, credentials)
        self._http_listener = (
            HttpListener.at(settings.uds)
            if settings.uds is not None
            else HttpListener.on_port(settings.host, settings.http_port)
        )
        allow_open_files(settings.max_http_connections + settings.max_grpc_connections)
        self._http = _http_server(settings, http_api.app(), metrics, tls)
        self._metrics_server: MetricsServer | None = None
        if settings.gateway_metrics_port is not None:
            self._metrics_server = serve_metrics(
                settings.host, settings.gateway_metrics_port, self._health, metrics.registry
            )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def http_port(self) -> int:
        """The port of HTTP; 0: it has a Unix socket."""
        return self._http_listener.port

    @property
    def metrics_port(self) -> int | None:
        """The port of metrics; None: there is none."""
        return None if self._metrics_server is None else self._metrics_server.port

    async def start(self) -> None:
        """Starts serving. Calls are rejected as not ready until a scheduler has their model.

        The keys of a token issuer that answers are read before; for one that does not this waits a few seconds.
        """
        if self._key_file is not None:
            first_read = asyncio.create_task(refresh_once(self._key_file.refresh_signing_keys))
            await asyncio.wait([first_read], timeout=_ISSUER_SECONDS)
        await self._grpc.start()
        keys = self._key_file
        self._tasks = [
            asyncio.create_task(self._session.run()),
            asyncio.create_task(self._report_health()),
            asyncio.create_task(self._http.serve(sockets=[self._http_listener.socket])),
            asyncio.create_task(keep_refreshed(*((keys.refresh, keys.refresh_signing_keys) if keys else ()))),
        ]
        for task in self._tasks:
            task.add_done_callback(_end_process_on_failure)
        names = {model.name: model.aliases for model in self._catalog}
        path = self._http_listener.path
        http: dict[str, object] = {"http_port": self.http_port} if path is None else {"uds": str(path)}
        about: dict[str, object] = {**http, "grpc_port": self.grpc_port, "models": names}
        if self.metrics_port is not None:
            about["metrics_port"] = self.metrics_port
        defaults = {model.name: model.given_defaults for model in self._catalog if model.given_defaults}
        if defaults:
            # Without a label for one model; by the model's name for several.
            about["defaults"] = defaults if len(names) > 1 else defaults.popitem()[1]
        logger.info("listening", extra=about)

    async def stop(self) -> None:
        """Reports NOT_SERVING, waits up to the grace for running requests, then closes everything."""
        session, reporter, http, reloading = self._tasks
        reporter.cancel()
        reloading.cancel()
        await self._health.set_serving(False)
        logger.info("draining", extra={"seconds": self._drain_grace})
        await self._request_manager.drain(self._drain_grace)
        self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(_CLOSE_SECONDS), http)
        session.cancel()
        await asyncio.gather(session, reporter, reloading, return_exceptions=True)
        self._http_listener.remove_file()
        self._threads.close()
        self._catalog.close()
        if self._metrics_server is not None:
            self._metrics_server.close()
        logger.info("stopped")

    async def _report_health(self) -> None:
        while True:
            self._changed.clear()
            await self._health.set_serving(self._request_manager.is_ready)
            await self._changed.wait()


def _grpc_server(settings: GatewaySettings, calls: GrpcCalls, admission: GrpcAdmission) -> grpc.aio.Server:
    """A server without services that is not bound."""
    return create_server(
        max_message_bytes=settings.max_grpc_message_bytes,
        max_answer_bytes=PUBLIC_MESSAGE_BYTES,
        interceptors=(
            admission,
            RequestGate(settings.grpc_read_timeout, calls.is_allowed, admission.receive),
            StreamGate(calls.check_credential),
            *server_interceptors(SERVICE),
            *server_interceptors(OPEN_INFERENCE_SERVICE),
        ),
        options=(
            ("grpc.max_allowed_incoming_connections", settings.max_grpc_connections),
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ("grpc.max_connection_idle_ms", _GRPC_IDLE_SECONDS * 1_000),
            # Time for a connection's TLS handshake and HTTP/2's first bytes.
            ("grpc.server_handshake_timeout_ms", int(settings.grpc_read_timeout * 1_000)),
        ),
    )


def _http_options(settings: GatewaySettings) -> HttpOptions:
    return HttpOptions(
        read_timeout=settings.http_read_timeout,
        undefined_fields=settings.unknown_fields,
        origins=settings.cors_origin_list,
        root_path=settings.root_path,
        always_has_usage=settings.stream_usage,
        names_tokens_by_id=settings.tokens_as_token_ids,
    )


def _http_server(settings: GatewaySettings, app: ASGIApp, metrics: GatewayMetrics, tls: TlsFiles | None) -> HttpServer:
    """A server without a listener."""
    limits = ConnectionLimits(
        settings.max_http_connections,
        settings.http_read_timeout,
        metrics.refuse,
        settings.max_http_connections_per_address,
    )
    config = BoundedConfig(
        app,
        limits,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the address of a client is not what it states
        lifespan="off",
        ws_max_size=MAX_BODY_BYTES,
        ws_per_message_deflate=False,
        ws_ping_interval=_WEBSOCKET_PING_SECONDS,
        ws_ping_timeout=_WEBSOCKET_PONG_SECONDS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        # Only streams that still run at the end of the grace get this short time.
        timeout_graceful_shutdown=int(_CLOSE_SECONDS),
    )
    return HttpServer(config, http_server_context(tls) if tls else None)


def _end_process_on_failure(task: asyncio.Task[None]) -> None:
    """Ends the process, so that it is started again, where a part of it has failed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("a part of the gateway ended", exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)
