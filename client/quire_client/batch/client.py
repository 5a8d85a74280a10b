"""Sends the requests of a batch over HTTP, each until it has an answer."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from time import monotonic
from types import SimpleNamespace
from typing import Any

import aiohttp

from quire_client.batch.input import BatchInput
from quire_client.batch.lines import BatchError, BatchLine, LineAnswer, reject_constant
from quire_client.batch.retries import MAX_ERRORS, NextStep, next_step, retry_after, waiting_time
from quire_client.http_client import base_url, error_message

_MODELS, _DOCUMENT = "/v1/models", "/openapi.json"
# Paths that every server has whose /v1/models answers as OpenAI's; others are looked up in its document.
_KNOWN = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_MAX_PROBLEM = 1_000  # characters


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    headers: Mapping[str, str]
    body: bytes


class _Failure(Enum):
    """Why a call has no response."""

    TIMEOUT = "the call took longer than its timeout"
    NO_CONNECTION = "there was no connection, or it broke"


@dataclass(slots=True)
class _Connection:
    """The connection of one call."""

    is_established: bool = False


class BatchClient:
    """Calls one server. `on_retry` is called with the reason for which a request is sent again."""

    def __init__(
        self,
        url: str,
        http: aiohttp.ClientSession,
        server_timeout: float,
        on_retry: Callable[[str], None] = lambda why: None,
    ) -> None:
        """The batch ends if for `server_timeout` seconds all attempts to open a connection have failed."""
        self._url = base_url(url)
        self._http = http
        self._server_timeout = server_timeout
        self._on_retry = on_retry
        self._unreachable_since: float | None = None
        """The first failed attempt after the last connection that was established."""
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(self._on_connection)
        trace.on_connection_reuseconn.append(self._on_connection)
        trace.freeze()
        http.trace_configs.append(trace)

    async def check(self, batch: BatchInput) -> None:
        """Waits until the server answers, and checks credentials and the urls of all lines. Raises BatchError."""
        models = await self._get(_MODELS)
        if not isinstance(models, dict) or not isinstance(models.get("data"), list):
            raise BatchError(f"{self._url}{_MODELS} does not answer as OpenAI's does")
        numbers = {url: number for url, number in batch.first_line_of_url.items() if url.rstrip("/") not in _KNOWN}
        if not numbers:
            return
        document = await self._get(_DOCUMENT)
        for url, number in numbers.items():
            if not takes_post(document, url):
                raise BatchError(
                    f"{batch.name}: line {number}: url: {url} is no path of {self._url} that takes POST"
                    + ("" if isinstance(document, dict) else f", or {_DOCUMENT} does not say so")
                )

    async def send(self, line: BatchLine, name: str) -> LineAnswer:
        """Sends a request under a name until it has an answer. Raises BatchError where the batch cannot go on."""

        def headers(num_names: int) -> dict[str, str]:
            named = {"idempotency-key": f"{name}_{num_names}" if num_names else name} if line.is_nameable else {}
            return {"content-type": "application/json", **named}

        # Without a name, the server cancels it at the timeout, and the next call begins it again.
        response = await self._call_until_final(
            "POST", line.url, headers, line.body, are_timeouts_errors=not line.is_nameable
        )
        if response is None:
            return LineAnswer(None, None, None, f"no answer within the timeout; {MAX_ERRORS} attempts have failed")
        return _answer(response)

    async def _get(self, path: str) -> Any:
        """The JSON at a path; None where it has none, or the response is an error that stays."""
        response = await self._call_until_final("GET", path, lambda _: {}, None)
        return _json_of(response.body) if response is not None and response.status == 200 else None

    async def _call_until_final(
        self,
        method: str,
        path: str,
        headers: Callable[[int], Mapping[str, str]],
        body: bytes | None,
        *,
        are_timeouts_errors: bool = False,
    ) -> _Response | None:
        """Calls until a response need not be retried. None: the last of MAX_ERRORS was a timeout.

        `headers` takes the number of names that cannot be used.
        """
        num_calls = num_errors = num_names = 0
        while True:
            response = await self._call(method, path, headers(num_names), body)
            num_calls += 1
            requested = None
            if isinstance(response, _Response):
                step = next_step(response.status, response.headers, response.body)
                if step is NextStep.END:
                    raise self._refusal(response)
                num_errors += step in (NextStep.RETRY_FEW, NextStep.RENAME)
                if step is NextStep.WRITE or num_errors >= MAX_ERRORS:
                    return response
                num_names += step is NextStep.RENAME
                requested = retry_after(response.headers)
                self._on_retry(error_message(response.status, response.body))
            elif response is _Failure.TIMEOUT:  # a named request runs on, and the next call attaches to it
                num_errors += are_timeouts_errors
                if num_errors >= MAX_ERRORS:
                    return None
                self._on_retry(f"no answer from {self._url} within the timeout")
            await asyncio.sleep(waiting_time(num_calls, requested))

    async def _call(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> _Response | _Failure:
        """Raises BatchError where no connection has been established for too long."""
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
                answer = _Response(response.status, response.headers, await response.read())
        except aiohttp.ClientConnectorCertificateError as error:
            raise BatchError(f"{self._url}: {error.certificate_error}; name a CA with QUIRE_CA_FILE") from error
        except (aiohttp.ClientError, OSError) as error:
            if not connection.is_established:
                self._note_no_connection()
                return _Failure.NO_CONNECTION
            self._unreachable_since = None
            if isinstance(error, TimeoutError):
                return _Failure.TIMEOUT
            self._on_retry(f"the connection to {self._url} broke")
            return _Failure.NO_CONNECTION
        self._unreachable_since = None
        return answer

    async def _on_connection(self, _: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        context.trace_request_ctx.is_established = True
        if isinstance(params, aiohttp.TraceConnectionCreateEndParams):  # one that is used again may be broken
            self._unreachable_since = None

    def _note_no_connection(self) -> None:
        """Raises BatchError where this has lasted too long."""
        why = f"no connection to {self._url}"
        now = monotonic()
        if self._unreachable_since is None:
            self._unreachable_since = now
        elif now - self._unreachable_since > self._server_timeout:
            raise BatchError(f"{why} for {self._server_timeout:g} s; start the same command again to go on")
        self._on_retry(why)

    def _refusal(self, response: _Response) -> BatchError:
        if 300 <= response.status < 400:
            place = response.headers.get("location", "another address")
            return BatchError(f"{self._url} redirects to {place}; name the server itself with --url")
        message = error_message(response.status, response.body)
        return BatchError(f"{self._url}: {message}; give a key with --api-key or QUIRE_API_KEY")


def takes_post(document: Any, url: str) -> bool:
    """Whether an OpenAPI document has a path that takes POST and matches the path of a url."""
    paths = document.get("paths") if isinstance(document, dict) else None
    if not isinstance(paths, dict):
        return False
    for template, methods in paths.items():
        pattern = re.sub(r"\\\{[^}]*\\\}", "[^/?#]+", re.escape(template))
        if isinstance(methods, dict) and "post" in methods and re.fullmatch(pattern, url.rstrip("/")):
            return True
    return False


def _answer(response: _Response) -> LineAnswer:
    request_id = response.headers.get("x-request-id")
    try:
        _parse(response.body)
    except (ValueError, RecursionError):
        text = response.body.decode(errors="replace")[:_MAX_PROBLEM].strip()
        return LineAnswer(response.status, request_id, None, text or "the response has no body")
    return LineAnswer(response.status, request_id, response.body)


def _json_of(body: bytes) -> Any:
    """The value of a body; None where it is not JSON."""
    try:
        return _parse(body)
    except (ValueError, RecursionError):
        return None


def _parse(body: bytes) -> Any:
    """The value of JSON in UTF-8. Raises ValueError, also for NaN and Infinity, and RecursionError."""
    return json.loads(body.decode(), parse_constant=reject_constant)
