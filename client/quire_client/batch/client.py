"""Sends the requests of a batch, each until it has an answer."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire_client.batch.input import BatchInput
from quire_client.batch.lines import BatchError, BatchLine, LineAnswer, reject_constant
from quire_client.batch.retries import MAX_ERRORS, NextStep, next_step, retry_after, waiting_time
from quire_client.batch.transport import Response, Transport
from quire_client.http_client import error_message

_MODELS, _DOCUMENT = "/v1/models", "/openapi.json"
# Paths that every server has whose /v1/models answers as OpenAI's; others are looked up in its document.
_KNOWN = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_MAX_PROBLEM = 1_000  # characters


class BatchClient:
    """Calls one server. `on_retry` is called with the reason for which a request is sent again."""

    def __init__(self, transport: Transport, on_retry: Callable[[str], None] = lambda why: None) -> None:
        self._transport = transport
        self._on_retry = on_retry

    async def check(self, batch: BatchInput) -> None:
        """Waits until the server answers, and checks credentials and the urls of all lines. Raises BatchError."""
        models = await self._get(_MODELS)
        if not isinstance(models, dict) or not isinstance(models.get("data"), list):
            raise BatchError(f"{self._transport.name}{_MODELS} does not answer as OpenAI's does")
        numbers = {url: number for url, number in batch.first_line_of_url.items() if url.rstrip("/") not in _KNOWN}
        if not numbers:
            return
        document = await self._get(_DOCUMENT)
        for url, number in numbers.items():
            if not takes_post(document, url):
                raise BatchError(
                    f"{batch.name}: line {number}: url: {url} is no path of {self._transport.name} that takes POST"
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
    ) -> Response | None:
        """Calls until a response need not be retried. None: the last of MAX_ERRORS was a timeout.

        `headers` takes the number of names that cannot be used.
        """
        num_calls = num_errors = num_names = 0
        while True:
            response = await self._transport.call(method, path, headers(num_names), body)
            num_calls += 1
            requested = None
            if isinstance(response, Response):
                step = next_step(response.status, response.headers, response.body)
                if step is NextStep.END:
                    raise self._refusal(response)
                num_errors += step in (NextStep.RETRY_FEW, NextStep.RENAME)
                if step is NextStep.WRITE or num_errors >= MAX_ERRORS:
                    return response
                num_names += step is NextStep.RENAME
                requested = retry_after(response.headers)
                self._on_retry(error_message(response.status, response.body))
            else:
                # A named request runs on after a timeout, and the next call attaches to it.
                num_errors += are_timeouts_errors and response.is_timeout
                if num_errors >= MAX_ERRORS:
                    return None
                self._on_retry(response.why)
            await asyncio.sleep(waiting_time(num_calls, requested))

    def _refusal(self, response: Response) -> BatchError:
        if 300 <= response.status < 400:
            place = response.headers.get("location", "another address")
            return BatchError(f"{self._transport.name} redirects to {place}; name the server itself with --url")
        message = error_message(response.status, response.body)
        return BatchError(f"{self._transport.name}: {message}; give a key with --api-key or QUIRE_API_KEY")


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


def _answer(response: Response) -> LineAnswer:
    # A proxy's own id comes back in x-request-id.
    request_id = response.headers.get("x-quire-request-id") or response.headers.get("x-request-id")
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
