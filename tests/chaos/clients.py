"""Clients that send one request at a time, resume it after each failure, and record what they receive."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

import aiohttp
import grpc

from gateway_svc.http_api.answer_sender import PING_SECONDS
from quire_client import AsyncClient, QuireError
from tests.chaos.cases import Case
from tests.chaos.histories import History, Usage

TIMEOUT = 120.0
"""Seconds without progress after which a client fails the request."""
_DEADLINE_REASONS = ("DEADLINE_EXCEEDED", "DEADLINE_TOO_SHORT")
# Until an HTTP client tries another gateway: a stopped process keeps its connections open. A request that waits is
# silent for a shorter time.
_READ_TIMEOUT = PING_SECONDS + 5.0
_MIN_BACKOFF, _MAX_BACKOFF = 0.05, 1.0


class Client(Protocol):
    """A client, with links of its own."""

    async def run(self, case: Case, history: History) -> None:
        """Sends the request and reads its stream to the end. A final error is recorded in the history."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


class GrpcClient:
    """The Python client, which resumes streams itself."""

    def __init__(self, addresses: Sequence[str], api_key: str) -> None:
        self._client = AsyncClient(",".join(addresses), api_key=api_key, resume_patience=TIMEOUT)

    async def run(self, case: Case, history: History) -> None:
        """Sends the request and reads its stream to the end, or waits for the result of a beam search."""
        options = {**case.options, "timeout": case.deadline}
        options |= {"request_id": history.name} if case.is_named else {"resume": False}
        try:
            await (self._search if case.is_beam_search else self._stream)(case, history, options)
        except QuireError as error:
            history.error = f"{error.reason}: {error}"
            is_late = case.deadline is not None and error.reason in _DEADLINE_REASONS
            history.may_end_so = is_late or (not case.is_named and error.code in (None, grpc.StatusCode.UNAVAILABLE))

    async def _stream(self, case: Case, history: History, options: dict[str, Any]) -> None:
        stream = self._client.stream(case.prompt, **options)
        async for chunk in stream:
            history.num_resumes = stream.num_resumes
            logprobs = tuple(one.logprob for one in chunk.logprobs)
            finish = None if chunk.finish is None else f"{chunk.finish.reason} {chunk.finish.matched}"
            history.add_chunk(chunk.index, chunk.offset, chunk.token_ids, chunk.text, logprobs, finish)
        if stream.usage is not None:
            history.usage = Usage(stream.usage.prompt_tokens, stream.usage.completion_tokens)

    async def _search(self, case: Case, history: History, options: dict[str, Any]) -> None:
        found = await self._client.generate(case.prompt, **options)
        for one in found.completions:
            history.add_chunk(one.index, 0, one.token_ids, one.text, (), f"{one.finish.reason} {one.finish.matched}")
        history.usage = Usage(found.usage.prompt_tokens, found.usage.completion_tokens)

    async def close(self) -> None:
        """Closes the channels."""
        await self._client.aclose()


class HttpClient:
    """Server-sent events: `Idempotency-Key` names the request, `Last-Event-ID` is the last event that was read."""

    def __init__(self, addresses: Sequence[str], api_key: str) -> None:
        self._addresses = list(addresses)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"},
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=_READ_TIMEOUT),
            trust_env=False,
        )

    async def run(self, case: Case, history: History) -> None:
        """Sends the request and reads its stream to the end."""
        body = {"prompt": case.prompt, "stream": True, "stream_options": {"include_usage": True}, **case.options}
        last_event, last_progress, backoff = "", monotonic(), _MIN_BACKOFF
        while True:
            headers = {"Idempotency-Key": history.name} if case.is_named else {}
            headers |= {"Last-Event-ID": last_event} if last_event else {}
            url = f"http://{self._addresses[0]}/v1/completions"
            try:
                async with self._session.post(url, json=body, headers=headers) as response:
                    if response.status != 200:
                        message = f"{response.status}: {await response.text()}"
                        if response.status < 500 and response.status != 429:
                            history.error = message
                            return
                        raise _Interrupted(message)
                    async for event in read_events(response.content):
                        last_event = event.id or last_event
                        last_progress, backoff = monotonic(), _MIN_BACKOFF
                        if event.data == "[DONE]":
                            return
                        _record_event(history, json.loads(event.data))
                raise _Interrupted("the stream ended early")
            except (aiohttp.ClientError, TimeoutError, ConnectionError, _Interrupted) as error:
                if not case.is_named and history.num_items:
                    history.error, history.may_end_so = f"{error!r}", True
                    return
                if monotonic() - last_progress > TIMEOUT:
                    history.error = f"no progress for {TIMEOUT:g} s: {error!r}"
                    return
                history.add_resume(f"{self._addresses[0]}: {error!r}; after event {last_event!r}")
            self._addresses.append(self._addresses.pop(0))
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF)

    async def close(self) -> None:
        """Closes the connections."""
        await self._session.close()


class _Interrupted(Exception):  # noqa: N818
    """The request can be resumed at another gateway."""


@dataclass(frozen=True)
class ServerSentEvent:
    """One event; `id` is empty if it has none."""

    id: str
    data: str


async def read_events(content: aiohttp.StreamReader) -> AsyncIterator[ServerSentEvent]:
    """Yields complete events; an incomplete last one is dropped."""
    rest = b""
    async for received in content.iter_any():
        *events, rest = (rest + received).split(b"\n\n")
        for event in events:
            fields = {"id": "", "data": ""}
            for line in event.decode().split("\n"):
                name, _, value = line.partition(":")
                if name in fields:
                    fields[name] = value.removeprefix(" ")
            if fields["data"]:
                yield ServerSentEvent(fields["id"], fields["data"])


def _record_event(history: History, event: dict[str, Any]) -> None:
    """Records an event. Raises _Interrupted for an error event."""
    if error := event.get("error"):
        raise _Interrupted(json.dumps(error))
    if usage := event.get("usage"):
        history.usage = Usage(usage["prompt_tokens"], usage["completion_tokens"])
    for choice in event["choices"]:
        logprobs = choice.get("logprobs") or {"tokens": tuple(choice["text"]), "token_logprobs": ()}
        history.add_chunk(
            choice["index"],
            None,
            tuple(logprobs["tokens"]),
            choice["text"],
            tuple(logprobs["token_logprobs"]),
            choice["finish_reason"],
        )
