"""A gateway process from start to stop: its two listeners over one engine and one session."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict

import uvicorn

from gateway_svc.auth import Authenticator
from gateway_svc.generation_config import load_generation_defaults
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.openai_http.app import HttpHandlers
from gateway_svc.request_manager import RequestManager
from gateway_svc.servicer import SERVICE, InferenceServicer
from gateway_svc.session import SchedulerSession
from gateway_svc.settings import GatewaySettings
from gateway_svc.tokenizer import ModelTokenizer
from quire.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from svc_common.addresses import cannot_listen, check_can_listen
from svc_common.models import ServedModel, tokenizer_fingerprint
from svc_common.server import PUBLIC_MESSAGE_BYTES, HealthReporter, bind, create_server, enable_reflection
from svc_common.telemetry import server_interceptors

logger = logging.getLogger("quire.gateway")

# Time for answers that are already written to reach their clients.
_CLOSE_SECONDS = 2.0
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 2048


class Gateway:
    """Both listeners. `http_port` and `grpc_port` are those in use."""

    def __init__(self, settings: GatewaySettings, model: ServedModel) -> None:
        """Binds both ports. Raises CannotListen, InvalidKeyFile, InvalidModelFiles and BadSetting."""
        authenticator = Authenticator.from_file(settings.api_keys)
        self._drain_grace = settings.drain_grace
        defaults = load_generation_defaults(settings.generation_config, settings.override_generation_config, model.path)
        self._defaults = {name: value for name, value in asdict(defaults).items() if value is not None}
        self._tokenizer = ModelTokenizer.load(model.path, model.other_tokenizer, settings.chat_template or None)
        self._changed = asyncio.Event()
        self._session = SchedulerSession(
            settings.scheduler_addresses,
            model.name,
            tokenizer_fingerprint(model.tokenizer_path),
            self._changed.set,
            settings.scheduler_patience,
        )
        self._request_manager = RequestManager(self._tokenizer, self._session, GatewayMetrics(), defaults)
        self._grpc = create_server(max_message_bytes=PUBLIC_MESSAGE_BYTES, interceptors=server_interceptors(SERVICE))
        add_InferenceServiceServicer_to_server(InferenceServicer(self._request_manager, authenticator), self._grpc)
        self._health = HealthReporter(self._grpc, [SERVICE])
        enable_reflection(self._grpc, [SERVICE])
        self.grpc_port = bind(self._grpc, settings.host, settings.grpc_port)
        self._http_socket = _listen(settings.host, settings.http_port)
        self.http_port: int = self._http_socket.getsockname()[1]
        handlers = HttpHandlers(self._request_manager, authenticator)
        self._http = _HttpServer(
            uvicorn.Config(
                handlers.app(),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                http="httptools",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                # Only what still streams at the end of the grace has so little time.
                timeout_graceful_shutdown=int(_CLOSE_SECONDS),
            )
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins to serve. Calls are refused as not ready until a scheduler has the model."""
        await self._grpc.start()
        self._tasks = [
            asyncio.create_task(self._session.run()),
            asyncio.create_task(self._report_health()),
            asyncio.create_task(self._http.serve(sockets=[self._http_socket])),
        ]
        for task in self._tasks:
            task.add_done_callback(_end_process_on_failure)
        about = {"http_port": self.http_port, "grpc_port": self.grpc_port}
        logger.info("listening", extra=about | ({"defaults": self._defaults} if self._defaults else {}))

    async def stop(self) -> None:
        """Says that it is not serving, lets running requests end within the grace, then closes everything."""
        session, reporter, http = self._tasks
        reporter.cancel()
        await self._health.set_serving(False)
        logger.info("draining", extra={"seconds": self._drain_grace})
        await self._request_manager.drain(self._drain_grace)
        self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(_CLOSE_SECONDS), http)
        session.cancel()
        await asyncio.gather(session, reporter, return_exceptions=True)
        self._tokenizer.close()
        logger.info("stopped")

    async def _report_health(self) -> None:
        while True:
            self._changed.clear()
            await self._health.set_serving(self._request_manager.is_ready)
            await self._changed.wait()


class _HttpServer(uvicorn.Server):
    """uvicorn's server, without its hold on the process's signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens on a port, or on a free one where `port` is 0. Raises CannotListen."""
    check_can_listen(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener


def _end_process_on_failure(task: asyncio.Task[None]) -> None:
    """Better started anew than half alive."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("a part of the gateway ended", exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)
