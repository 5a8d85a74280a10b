"""Clients that do not give up: each asks one request at a time, goes on after whatever happens, and records it all."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

import aiohttp

from quire_client import AsyncClient, QuireError
from tests.chaos.cases import Case
from tests.chaos.histories import History, Usage

PATIENCE = 120.0
"""Seconds without anything new after which a client gives up."""
_SILENCE = 10.0  # after which an HTTP client tries another gateway: one that is stopped says nothing, not even the end
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0


class Client(Protocol):
    """Someone who asks, through links of their own."""

    async def ask(self, case: Case, history: History) -> None:
        """Asks and reads to the end. What goes wrong for good is told in the history."""
        ...

    async def close(self) -> None:
        """Lets go of connections."""
        ...


class GrpcClient:
    """The Python client, which resumes by itself."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._client = AsyncClient(",".join(addresses), resume_patience=PATIENCE)

    async def ask(self, case: Case, history: History) -> None:
        """Asks and reads to the end."""
        stream = self._client.stream(case.prompt, request_id=history.name, **case.options)
        try:
            async for chunk in stream:
                history.num_resumes = stream.num_resumes
                finish = None if chunk.finish is None else f"{chunk.finish.reason} {chunk.finish.matched}"
                logprobs = tuple(one.logprob for one in chunk.logprobs)
                history.came(chunk.index, chunk.offset, chunk.token_ids, chunk.text, logprobs, finish)
            if stream.usage is not None:
                history.usage = Usage(stream.usage.prompt_tokens, stream.usage.completion_tokens)
        except QuireError as error:
            history.error = f"{error.reason}: {error}"

    async def close(self) -> None:
        """Ends the channels."""
        await self._client.aclose()


class HttpClient:
    """Plain server-sent events: `Idempotency-Key` names the request, `Last-Event-ID` says how far it was read."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=_SILENCE),
            trust_env=False,
        )

    async def ask(self, case: Case, history: History) -> None:
        """Asks and reads to the end."""
        body = {"prompt": case.prompt, "stream": True, "stream_options": {"include_usage": True}, **case.options}
        last_event, last_news, wait = "", monotonic(), _FIRST_WAIT
        while True:
            headers = {"Idempotency-Key": history.name} | ({"Last-Event-ID": last_event} if last_event else {})
            url = f"http://{self._addresses[0]}/v1/completions"
            try:
                async with self._session.post(url, json=body, headers=headers) as response:
                    if response.status != 200:
                        why = f"{response.status}: {await response.text()}"
                        if response.status < 500 and response.status != 429:
                            history.error = why
                            return
                        raise _Broken(why)
                    async for event in read_events(response.content):
                        last_event = event.id or last_event
                        last_news, wait = monotonic(), _FIRST_WAIT
                        if event.data == "[DONE]":
                            return
                        _take(history, json.loads(event.data))
                raise _Broken("the stream ended early")
            except (aiohttp.ClientError, TimeoutError, ConnectionError, _Broken) as error:
                if monotonic() - last_news > PATIENCE:
                    history.error = f"nothing new for {PATIENCE:g} s: {error!r}"
                    return
                history.resumed(f"{self._addresses[0]}: {error!r}; after event {last_event!r}")
            self._addresses.append(self._addresses.pop(0))
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    async def close(self) -> None:
        """Ends the connections."""
        await self._session.close()


class _Broken(Exception):  # noqa: N818
    """The request may go on elsewhere."""


@dataclass(frozen=True)
class ServerSentEvent:
    """One event; `id` is empty where it has none."""

    id: str
    data: str


async def read_events(content: aiohttp.StreamReader) -> AsyncIterator[ServerSentEvent]:
    """Whole events only: one that broke off in the middle was not given."""
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


def _take(history: History, event: dict[str, Any]) -> None:
    """Notes what an event says. Raises _Broken for one that says that the stream is over early."""
    if error := event.get("error"):
        raise _Broken(json.dumps(error))
    if usage := event.get("usage"):
        history.usage = Usage(usage["prompt_tokens"], usage["completion_tokens"])
    for choice in event["choices"]:
        logprobs = choice.get("logprobs") or {"tokens": tuple(choice["text"]), "token_logprobs": ()}
        history.came(
            choice["index"],
            None,
            tuple(logprobs["tokens"]),
            choice["text"],
            tuple(logprobs["token_logprobs"]),
            choice["finish_reason"],
        )
