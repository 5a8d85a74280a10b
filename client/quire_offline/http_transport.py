"""The gateway's HTTP API over an engine, called within the process: routes, bodies and errors are those of a server."""

import asyncio
import logging
import math
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import quote, unquote

from gateway_svc.auth import Authenticator
from gateway_svc.call_limits import CallLimits
from gateway_svc.failed_logins import FailedLogins
from gateway_svc.http_api.app import HttpApi, HttpOptions
from gateway_svc.http_api.hosts import AllowedHosts
from gateway_svc.tenant_threads import TenantThreads
from quire_client.batch.lines import BatchError
from quire_client.batch.transport import NoResponse, Response
from quire_offline.engine import OfflineEngine

logger = logging.getLogger("quire.offline")

_URL_CHARACTERS = "%!#$&'()*+,/:;=?@[]~"  # and letters, digits, "_", "." and "-", which `quote` never changes


class EngineTransport:
    """A Transport to an engine, on the engine's loop."""

    def __init__(self, engine: OfflineEngine) -> None:
        """Call `close` at the end, before that of the engine."""
        self._engine = engine
        self._threads = TenantThreads(2, "long-work")
        manager = engine.manager
        api = HttpApi(
            manager,
            Authenticator(None, FailedLogins(manager.metrics.failed_logins)),
            AllowedHosts(("*",)),
            self._threads,
            HttpOptions(read_timeout=math.inf, undefined_fields=engine.undefined_fields),
            CallLimits.unlimited(),
        )
        self._app = api.app()

    @property
    def name(self) -> str:
        return "this process"

    async def call(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Response | NoResponse:
        """One call. Raises BatchError where the engine or the API has failed."""
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": unquote(path),
            "raw_path": quote(path, safe=_URL_CHARACTERS).encode(),
            "query_string": quote(query, safe=_URL_CHARACTERS).encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        exchange = _Exchange(body or b"")
        problem: object = None
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:
            logger.exception("the HTTP API failed")
            problem = f"{path}: the HTTP API failed: {type(error).__name__}"
        else:
            if exchange.status == 0:
                problem = f"{path}: the HTTP API ended without a response"
        if (problem := self._engine.failure or problem) is not None:
            raise BatchError(f"{problem}; start the same command again to go on")
        return Response(exchange.status, exchange.headers, bytes(exchange.body))

    def close(self) -> None:
        self._threads.close()


class _Exchange:
    """The client's side of one call over ASGI. It never leaves."""

    def __init__(self, body: bytes) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self._sent: bytes | None = body

    async def receive(self) -> dict[str, Any]:
        if self._sent is None:
            await asyncio.get_running_loop().create_future()  # for ever: until the call has ended
        sent, self._sent = self._sent, None
        return {"type": "http.request", "body": sent, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
