"""The HTTP client goes on after the last whole event, at the next gateway, and records what it saw."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from reference import Reference
from tests.chaos.cases import Case, Protocol
from tests.chaos.clients import HttpClient
from tests.chaos.histories import FaultCount, History, Usage

CASE = Case("case", Protocol.HTTP, (1, 2), {"max_tokens": 3}, Reference((1, 2), (), frozenset()))
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def event(name: str, text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return f"id: {name}\ndata: {json.dumps({'choices': [choice]})}\n\n".encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def gateway(answers: Sequence[bytes], heads: list[str]) -> AsyncIterator[str]:
    """Gives each call the next answer and closes the connection; notes what each call began with."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()


async def ask(*answers: Sequence[bytes]) -> tuple[History, list[str]]:
    """Asks gateways with such answers."""
    heads: list[str] = []
    history = History("name", "case", FaultCount())
    async with AsyncExitStack() as gateways:
        addresses = [await gateways.enter_async_context(gateway(each, heads)) for each in answers]
        client = HttpClient(addresses)
        async with asyncio.timeout(60):
            await client.ask(CASE, history)
        await client.close()
    return history, heads


def text(history: History) -> str:
    return "".join(entry.text for entry in history.entries)


async def test_a_stream_to_its_end() -> None:
    history, heads = await ask([OK + event("1", "ab") + event("2", "c", "length") + USAGE + DONE])
    assert (text(history), history.usage, history.error, history.num_resumes) == ("abc", Usage(2, 3), None, 0)
    assert "idempotency-key: name" in heads[0]
    assert "last-event-id" not in heads[0]


async def test_it_goes_on_elsewhere_after_the_last_whole_event() -> None:
    broken = OK + event("1", "ab") + event("2", "c", "length")[:-5]
    history, heads = await ask([broken], [OK + event("2", "c", "length") + USAGE + DONE])
    assert (text(history), history.usage, history.num_resumes) == ("abc", Usage(2, 3), 1)
    assert "last-event-id: 1\r\n" in heads[1]
    assert [entry.finish for entry in history.entries if entry.items] == [None, "length"]


async def test_it_goes_on_after_an_error_in_the_stream_and_after_a_gateway_that_is_busy() -> None:
    busy = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
    failed = OK + event("1", "ab") + b'data: {"error": {"message": "draining"}}\n\n'
    history, _ = await ask([failed, OK + event("2", "c", "length") + USAGE + DONE], [busy])
    assert (text(history), history.usage, history.num_resumes) == ("abc", Usage(2, 3), 2)


async def test_a_refusal_is_the_end() -> None:
    refused = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nno!"
    history, _ = await ask([refused])
    assert history.error == "400: no!"
