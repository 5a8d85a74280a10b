"""How requests of a batch reach what answers them: over HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from types import SimpleNamespace
from typing import Protocol

import aiohttp

from quire_client.batch.lines import BatchError
from quire_client.http_client import base_url


@dataclass(frozen=True, slots=True)
class Response:
    """The response to a call. Names of `headers` are case-insensitive or in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class NoResponse:
    """A call without a response, and why. At a timeout, a request with a name may run on."""

    why: str
    is_timeout: bool = False


class Transport(Protocol):
    """Calls paths of OpenAI's HTTP API."""

    @property
    def name(self) -> str:
        """What is called, for messages."""

    async def call(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Response | NoResponse:
        """One call. Raises BatchError where no later one can have a response either."""


_HEALTH_TIMEOUT = 10.0  # seconds


@dataclass(slots=True)
class _Connection:
    """The connection of one call."""

    is_established: bool = False


class HttpTransport:
    """Calls one server."""

    def __init__(self, url: str, http: aiohttp.ClientSession, server_timeout: float) -> None:
        """The batch ends if no call has had a response for `server_timeout` seconds. A server that still answers
        `/health` then has more time: it may compute calls that took longer than their timeout, or whose connections
        were cut between it and here.
        """
        self._url = base_url(url)
        self._http = http
        self._server_timeout = server_timeout
        self._failing_since: float | None = None
        """The first failed call after the last response."""
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(self._on_connection)
        trace.on_connection_reuseconn.append(self._on_connection)
        trace.freeze()
        http.trace_configs.append(trace)

    @property
    def name(self) -> str:
        """Its URL."""
        return self._url

    async def call(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Response | NoResponse:
        """One call. Raises BatchError where there has been no response for too long."""
        connection = _Connection()
        try:
            async with self._http.request(
                method,
                f"{self._url}{path}",
                headers=headers,
                data=body,
                allow_redirects=False,
                trace_request_ctx=connection,
            ) as response:
                answer = Response(response.status, response.headers, await response.read())
        except aiohttp.ClientConnectorCertificateError as error:
            raise BatchError(f"{self._url}: {error.certificate_error}; name a CA with QUIRE_CA_FILE") from error
        except aiohttp.ClientConnectorSSLError as error:
            why = "the server there may have no TLS: then its URL begins with http://"
            raise BatchError(f"{self._url}: TLS fails; {why}") from error
        except (aiohttp.ClientError, OSError) as error:
            return await self._no_response(error, is_connected=connection.is_established)
        self._failing_since = None
        return answer

    async def _on_connection(self, _: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
        context.trace_request_ctx.is_established = True

    async def _answers_at_all(self) -> bool:
        """Whether there is any response in HTTP."""
        limit = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT)
        try:
            async with self._http.get(f"{self._url}/health", timeout=limit, trace_request_ctx=_Connection()):
                return True
        except (aiohttp.ClientError, OSError):
            return False

    async def _no_response(self, error: Exception, *, is_connected: bool) -> NoResponse:
        """Raises BatchError where this has lasted too long."""
        is_timeout = False
        if not is_connected:
            what = why = f"no connection to {self._url}"
        else:
            what = f"no HTTP response from {self._url}"
            if isinstance(error, TimeoutError):
                why, is_timeout = f"no answer from {self._url} within the timeout", True
            elif isinstance(error, aiohttp.ClientResponseError):
                why = f"{self._url} does not answer in HTTP"
            else:
                why = f"the connection to {self._url} broke"
        now = monotonic()
        if self._failing_since is None:
            self._failing_since = now
        elif now - self._failing_since > self._server_timeout:
            if not (is_connected and await self._answers_at_all()):
                raise BatchError(f"{what} for {self._server_timeout:g} s; start the same command again to go on")
            self._failing_since = None
        return NoResponse(why, is_timeout)
