"""The HTTP client resumes after the last complete event, at the next gateway, and records what it receives."""

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
async def gateway(responses: Sequence[bytes], heads: list[str]) -> AsyncIterator[str]:
    """Sends each call the next response and closes the connection. The heads of the calls are added to `heads`."""
    remaining = list(responses)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(remaining.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()


async def run(*responses: Sequence[bytes]) -> tuple[History, list[str]]:
    """Runs the case with one gateway for each argument, a list of its responses."""
    heads: list[str] = []
    history = History("name", "case", FaultCount())
    async with AsyncExitStack() as gateways:
        addresses = [await gateways.enter_async_context(gateway(each, heads)) for each in responses]
        client = HttpClient(addresses, "a key of this test")
        async with asyncio.timeout(60):
            await client.run(CASE, history)
        await client.close()
    return history, heads


def text(history: History) -> str:
    return "".join(entry.text for entry in history.entries)


async def test_a_stream_is_read_to_its_end() -> None:
    history, heads = await run([OK + event("1", "ab") + event("2", "c", "length") + USAGE + DONE])
    assert (text(history), history.usage, history.error, history.num_resumes) == ("abc", Usage(2, 3), None, 0)
    assert "idempotency-key: name" in heads[0]
    assert "last-event-id" not in heads[0]


async def test_it_resumes_at_another_gateway_after_the_last_complete_event() -> None:
    broken = OK + event("1", "ab") + event("2", "c", "length")[:-5]
    history, heads = await run([broken], [OK + event("2", "c", "length") + USAGE + DONE])
    assert (text(history), history.usage, history.num_resumes) == ("abc", Usage(2, 3), 1)
    assert "last-event-id: 1\r\n" in heads[1]
    assert [entry.finish for entry in history.entries if entry.items] == [None, "length"]


async def test_it_resumes_after_an_error_event_and_after_an_unavailable_gateway() -> None:
    busy = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
    failed = OK + event("1", "ab") + b'data: {"error": {"message": "draining"}}\n\n'
    history, _ = await run([failed, OK + event("2", "c", "length") + USAGE + DONE], [busy])
    assert (text(history), history.usage, history.num_resumes) == ("abc", Usage(2, 3), 2)


async def test_a_rejection_is_final() -> None:
    refused = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nno!"
    history, _ = await run([refused])
    assert history.error == "400: no!"
