"""The servers that a load can go to: Quire over gRPC, or any server with OpenAI's completions over HTTP."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import aiohttp

from quire_client.aio import AsyncClient
from quire_client.bench.latency import RequestTimings, TokenArrival, spread_evenly
from quire_client.bench.mix import MixRequest
from quire_client.http_client import base_url, error_message

OnTokens = Callable[[int], None]
"""Called with the number of tokens of each arrival."""


class TargetError(Exception):
    """A server that cannot be measured, or a failed request. The text is a message for users."""


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model that is measured. `vocab_size` is None where the server does not send it."""

    name: str
    vocab_size: int | None


class BenchTarget(Protocol):
    """A server under load. Raises TargetError or QuireError."""

    async def model(self) -> TargetModel:
        """The model that is measured."""

    async def run(self, request: MixRequest, on_tokens: OnTokens) -> RequestTimings:
        """Sends a request, greedy and with end-of-text ignored, and reads its stream to the end."""


class QuireTarget:
    """Quire's own gRPC service."""

    def __init__(self, client: AsyncClient, model: str | None = None) -> None:
        self._client = client
        self._model = model

    async def model(self) -> TargetModel:
        """The named model, or the first one."""
        for model in await self._client.models():
            if self._model in (None, model.name, *model.aliases):
                self._model = model.name
                return TargetModel(model.name, model.vocab_size)
        raise TargetError(f"the server has no model {self._model or 'yet'}")

    async def run(self, request: MixRequest, on_tokens: OnTokens) -> RequestTimings:
        """Sends a request and reads its stream."""
        arrivals = []
        stream = self._client.stream(
            request.prompt_token_ids,
            model=self._model,
            max_tokens=request.output_tokens,
            temperature=0,
            ignore_eos=True,
            resume=False,  # a broken call is a failure here, and each named request would be kept for an hour
        )
        sent = perf_counter()
        async for chunk in stream:
            if chunk.token_ids:
                arrivals.append(TokenArrival(perf_counter(), len(chunk.token_ids)))
                on_tokens(len(chunk.token_ids))
        return timeline(sent, tuple(arrivals))


class OpenAITarget:
    """A server with OpenAI's /v1/models and streaming /v1/completions, with token ids as prompt and `ignore_eos`.

    Such a stream does not say how many tokens a chunk has: the usage at its end is spread over chunks with text.
    """

    def __init__(self, url: str, http: aiohttp.ClientSession, model: str | None = None) -> None:
        self._url = base_url(url)
        self._http = http
        self._model = model

    async def model(self) -> TargetModel:
        """The named model, or the first one."""
        if self._model is None:
            with self._wrap_errors(f"{self._url}/v1/models does not answer as OpenAI's does"):
                async with self._http.get(f"{self._url}/v1/models") as response:
                    body = await response.read()
                if not response.ok:
                    raise _refusal(response.status, body)
                self._model = str(json.loads(body)["data"][0]["id"])
        return TargetModel(self._model, None)

    async def run(self, request: MixRequest, on_tokens: OnTokens) -> RequestTimings:
        """Sends a request and reads its stream."""
        body = {
            "model": (await self.model()).name,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        times = []
        num_tokens = None
        sent = perf_counter()
        with self._wrap_errors(f"{self._url}/v1/completions does not stream as OpenAI's does"):
            async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
                if not response.ok:
                    raise _refusal(response.status, await response.read())
                async for event in _events(response):
                    if any(choice.get("text") for choice in event.get("choices", ())):
                        times.append(perf_counter())
                        on_tokens(1)
                    if event.get("usage"):
                        num_tokens = int(event["usage"]["completion_tokens"])
        if num_tokens is None:
            raise TargetError("the stream ended without usage")
        return timeline(sent, spread_evenly(times, num_tokens) if times else ())

    @contextmanager
    def _wrap_errors(self, otherwise: str) -> Iterator[None]:
        """Turns errors within into TargetError; `otherwise` is the message for an invalid response."""
        try:
            yield
        except TimeoutError as error:  # aiohttp's are ClientErrors too
            raise TargetError(f"no answer from {self._url} within the timeout") from error
        except aiohttp.ClientConnectorError as error:
            raise TargetError(f"no connection to {self._url}") from error
        except aiohttp.ClientError as error:
            raise TargetError(f"the connection to {self._url} broke") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TargetError(otherwise) from error


def timeline(sent: float, arrivals: tuple[TokenArrival, ...]) -> RequestTimings:
    """The timings of a request. Raises TargetError for one without a token."""
    if not arrivals:
        raise TargetError("the stream ended without a token")
    return RequestTimings(sent, arrivals)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event. Raises TargetError at an error event and at an end without [DONE]."""
    is_done = False
    async for line in _lines(response.content):
        if is_done or not line.startswith(b"data:"):
            continue  # also after [DONE]: a connection is reused only where its response was read to the end
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            is_done = True
            continue
        event = json.loads(data.decode())
        if event.get("error"):
            raise _refusal(response.status, data)
        yield event
    if not is_done:
        raise TargetError("the stream ended early")


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines as they come, the last one with or without its end; a carriage return before the end stays."""
    rest = b""
    async for received in content.iter_any():
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _refusal(status: int, body: bytes) -> TargetError:
    return TargetError(error_message(status, body))
