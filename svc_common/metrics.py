"""Serves a process's Prometheus metrics and health over HTTP, on a port that asks for no credential.

Kubernetes probes the health of schedulers and workers there: it has no certificate for a port with mutual TLS. Anyone
may connect, so connections have bounds in number, time and size.
"""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from io import BufferedIOBase
from socketserver import ThreadingMixIn
from typing import Any, TypeAlias, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import choose_encoder

from svc_common.addresses import cannot_listen, check_can_listen
from svc_common.loop_calls import call_on_loop
from svc_common.server import LIVENESS, HealthReporter

Details: TypeAlias = Callable[[], Mapping[str, object]]
"""What `/health` reports beside the status, by name, as JSON values."""

MAX_CONNECTIONS = 32
"""Where there are more, the oldest one is closed: a flood does not keep out a probe."""
CONNECTION_SECONDS = 30.0
"""A connection is closed after this time, with or without an answer."""
MAX_HEADER_BYTES = 2**15
"""The request line and the headers; the rest is not read."""
_POLL_SECONDS = 0.1  # until close() is noticed, of which each end of a process waits for one

_HEALTH_SERVICES = {"/live": LIVENESS, "/health": ""}


class MetricsServer:
    """`GET /metrics` of a registry, `/live` and `/health`, from daemon threads."""

    def __init__(
        self, host: str, port: int, health: HealthReporter | None, registry: CollectorRegistry, details: Details | None
    ) -> None:
        """`health` belongs to the running event loop; None: there is no health."""
        self._details = details
        self._metrics: Callable[..., Any] = make_wsgi_app(registry)
        self._making_page = threading.Lock()
        self._health = health
        self._loop = asyncio.get_running_loop() if health is not None else None
        server_class = _Ipv6Server if ":" in host else _Server
        self._server = make_server(host, port, self._respond, server_class, _SilentHandler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if self._health is None or path not in _HEALTH_SERVICES:
            if not _is_readable(environ.get("HTTP_ACCEPT", "")):
                del environ["HTTP_ACCEPT"]
            with self._making_page:  # collectors may take time of the event loop: not for several pages at once
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


def _is_readable(accept: str) -> bool:
    """Whether prometheus_client can read an Accept header. It fails with some that are malformed."""
    try:
        choose_encoder(accept)
    except (TypeError, ValueError):
        return False
    return True


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any, **options: Any) -> None:
        self._accepted_at: dict[socket.socket, float] = {}  # by connection, oldest first
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._accepted_at) >= MAX_CONNECTIONS:
            self._disconnect(next(iter(list(self._accepted_at)), None))
        self._accepted_at[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._accepted_at.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called about twice a second."""
        super().service_actions()
        latest = time.monotonic() - CONNECTION_SECONDS
        for request, accepted_at in list(self._accepted_at.items()):
            if accepted_at <= latest:
                self._disconnect(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing of connections that clients or bounds have closed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _disconnect(self, request: socket.socket | None) -> None:
        """The connection's thread ends, which closes it."""
        if request is not None:
            self._accepted_at.pop(request, None)
            with suppress(OSError):  # closed already
                request.shutdown(socket.SHUT_RDWR)


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _HeaderReader:
    """Reads the lines of a request's headers; where they are too long, they end."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self._num_left = MAX_HEADER_BYTES

    def readline(self, size: int = -1) -> bytes:
        line = self._stream.readline(min(size, self._num_left) if size >= 0 else self._num_left)
        self._num_left -= len(line)
        return line

    def close(self) -> None:
        self._stream.close()


class _SilentHandler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile = cast(BufferedIOBase, _HeaderReader(self.rfile))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (a name of the base class)
        """Logs nothing, of bad requests either: anyone may send them."""


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
