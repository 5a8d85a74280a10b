"""Serves a process's Prometheus metrics and health over HTTP, on a port that asks for no credential.

Kubernetes probes the health of schedulers and workers there: it has no certificate for a port with mutual TLS.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app

from svc_common.addresses import cannot_listen, check_can_listen
from svc_common.loop_calls import call_on_loop
from svc_common.server import LIVENESS, HealthReporter

Details: TypeAlias = Callable[[], Mapping[str, object]]
"""What `/health` reports beside the status, by name, as JSON values."""

MAX_CONNECTIONS = 64
_HEALTH_SERVICES = {"/live": LIVENESS, "/health": ""}


class MetricsServer:
    """`GET /metrics` of a registry, `/live` and `/health`, from daemon threads."""

    def __init__(
        self, host: str, port: int, health: HealthReporter | None, registry: CollectorRegistry, details: Details | None
    ) -> None:
        """`health` belongs to the running event loop; None: there is no health."""
        self._details = details
        self._metrics: Callable[..., Any] = make_wsgi_app(registry)
        self._health = health
        self._loop = asyncio.get_running_loop() if health is not None else None
        server_class = _Ipv6Server if ":" in host else _Server
        self._server = make_server(host, port, self._respond, server_class, _SilentHandler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if self._health is None or path not in _HEALTH_SERVICES:
            metrics: Iterable[bytes] = self._metrics(environ, start_response)
            return metrics
        is_serving = self._is_serving(self._health, _HEALTH_SERVICES[path])
        status, text = ("200 OK", b"SERVING\n") if is_serving else ("503 Service Unavailable", b"NOT_SERVING\n")
        kind = "text/plain"
        if self._details is not None and path == "/health":
            kind, text = "application/json", json.dumps({"status": text.decode().strip(), **self._details()}).encode()
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(text)))])
        return [text]

    def _is_serving(self, health: HealthReporter, service: str) -> bool:
        """The status of a health service, from the event loop: one that hangs is not live."""
        assert self._loop is not None
        try:
            return call_on_loop(self._loop, lambda: health.is_serving(service))
        except (TimeoutError, RuntimeError):  # RuntimeError: the loop is closed
            return False


class _Server(ThreadingMixIn, WSGIServer):
    """Has a bounded number of connections. The oldest is closed for a new one, so slow callers keep no probe away."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # in the order in which they came

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) == MAX_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
                with suppress(OSError):  # it may be closed by its caller
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    timeout = 10.0  # seconds for each read

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Logs nothing."""


def serve_metrics(
    host: str,
    port: int,
    health: HealthReporter | None = None,
    registry: CollectorRegistry = REGISTRY,
    details: Details | None = None,
) -> MetricsServer:
    """Serves metrics, and health if it is given, on a port, or on a free one where `port` is 0.

    With `details` the answer of `/health` is a JSON object with the status and with these. Any thread may call it.

    Raises AddressInUse or CannotListen.
    """
    check_can_listen(host, port)
    try:
        return MetricsServer(host, port, health, registry, details)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
