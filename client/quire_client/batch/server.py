"""The server of a batch, over HTTP: a request is sent until it has an answer."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import aiohttp

from quire_client.batch.input import BatchInput
from quire_client.batch.lines import BatchError, BatchLine, LineAnswer
from quire_client.batch.retries import MAX_ERRORS, NextStep, next_step, retry_after, waiting_time
from quire_client.http_client import base_url, error_message

_MODELS, _DOCUMENT = "/v1/models", "/openapi.json"
# Paths that every server has whose /v1/models answers as OpenAI's; others are looked up in its document.
_KNOWN = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_MAX_PROBLEM = 1_000  # characters


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    headers: Mapping[str, str]
    body: bytes


class BatchServer:
    """Sends requests over one HTTP client. `on_retry` is called with the reason for which a request is sent again."""

    def __init__(
        self,
        url: str,
        http: aiohttp.ClientSession,
        max_away: float,
        on_retry: Callable[[str], None] = lambda why: None,
    ) -> None:
        """The batch ends if no connection has worked for `max_away` seconds."""
        self._url = base_url(url)
        self._http = http
        self._max_away = max_away
        self._on_retry = on_retry
        self._away_since: float | None = None

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

    async def answer(self, line: BatchLine, name: str) -> LineAnswer:
        """Sends a request under a name until it has an answer. Raises BatchError where the batch cannot go on."""

        def headers(num_names: int) -> dict[str, str]:
            named = {"idempotency-key": f"{name}_{num_names}" if num_names else name} if line.is_nameable else {}
            return {"content-type": "application/json", **named}

        return _answer(await self._call_until_final("POST", line.url, headers, line.body))

    async def _get(self, path: str) -> Any:
        """The JSON at a path; None where it has none, or the response is an error that stays."""
        response = await self._call_until_final("GET", path, lambda _: {}, None)
        return _json_of(response.body) if response.status == 200 else None

    async def _call_until_final(
        self, method: str, path: str, headers: Callable[[int], Mapping[str, str]], body: bytes | None
    ) -> _Response:
        """Calls until a response need not be retried. `headers` takes the number of names that were in vain."""
        num_calls = num_errors = num_names = 0
        while True:
            response = await self._call(method, path, headers(num_names), body)
            num_calls += 1
            asked = None
            if response is not None:
                step = next_step(response.status, response.headers, response.body)
                if step is NextStep.END:
                    raise self._refusal(response)
                num_errors += step in (NextStep.RETRY_FEW, NextStep.RENAME)
                if step is NextStep.WRITE or num_errors >= MAX_ERRORS:
                    return response
                num_names += step is NextStep.RENAME
                asked = retry_after(response.headers)
                self._on_retry(error_message(response.status, response.body))
            await asyncio.sleep(waiting_time(num_calls, asked))

    async def _call(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> _Response | None:
        """The response. None: there was no connection, it broke, or the call took longer than its timeout."""
        try:
            async with self._http.request(
                method, f"{self._url}{path}", headers=headers, data=body, allow_redirects=False
            ) as response:
                answer = _Response(response.status, response.headers, await response.read())
        except aiohttp.ServerTimeoutError:
            self._note_no_connection(f"no connection to {self._url}")
        except TimeoutError:  # of the call: the request may run, and the next call under its name goes on with it
            self._on_retry(f"no answer from {self._url} within the timeout")
        except aiohttp.ClientConnectorCertificateError as error:
            raise BatchError(f"{self._url}: {error.certificate_error}; name a CA with QUIRE_CA_FILE") from error
        except aiohttp.ClientConnectorError:
            self._note_no_connection(f"no connection to {self._url}")
        except (aiohttp.ClientError, OSError):
            self._note_no_connection(f"the connection to {self._url} broke")
        else:
            self._away_since = None
            return answer
        return None

    def _note_no_connection(self, why: str) -> None:
        """Raises BatchError where this has lasted too long."""
        now = monotonic()
        if self._away_since is None:
            self._away_since = now
        elif now - self._away_since > self._max_away:
            raise BatchError(f"{why} for {self._max_away:g} s; start the same command again to go on")
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
    if _json_of(response.body) is not None:
        return LineAnswer(response.status, request_id, response.body)
    text = response.body.decode(errors="replace")[:_MAX_PROBLEM].strip()
    return LineAnswer(response.status, request_id, None, text or "the response has no body")


def _json_of(body: bytes) -> Any:
    """The value of a body; None where it is not JSON in UTF-8."""
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
