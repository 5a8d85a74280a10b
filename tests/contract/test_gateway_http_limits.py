"""Bounds of HTTP connections: size and number of headers, time to read a request, number of connections, and what a
connection holds of requests that are not answered yet, or never read."""

import asyncio
import gc
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway_harness import Harness, encoded, running_gateway
from gateway_svc import gateway
from gateway_svc.http_api.connection import MAX_HEAD_BYTES, MAX_HEADERS
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedSession, answer_with, length_end
from tiny_model import EOS

MIB = 2**20
SHORT = 0.3  # seconds
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@asynccontextmanager
async def connected(quire: Harness) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", quire.gateway.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def status_of(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(60):
        return int((await reader.readuntil(b"\r\n")).split()[1])


async def closed(reader: asyncio.StreamReader) -> None:
    """Waits until the gateway closes the connection."""
    async with asyncio.timeout(60):
        with suppress(ConnectionError):
            assert await reader.read() == b""


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /live HTTP/1.1\r\na: " + b"x" * (MAX_HEAD_BYTES - 1_000) + b"\r\n\r\n", 200),
        (b"GET /live HTTP/1.1\r\na: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
        (b"GET /live HTTP/1.1\r\n" + b"a" * (MAX_HEAD_BYTES + 1) + b": x\r\n\r\n", 431),
        (b"GET /" + b"x" * (MAX_HEAD_BYTES + 1), 431),
        (b"GET /live HTTP/1.1\r\na: " + b"x" * (MAX_HEAD_BYTES + 1), 431),
        (b"\r\n" * MAX_HEAD_BYTES, 431),
        (b"GET /live HTTP/1.1\r\n" + b"a: x\r\n" * MAX_HEADERS + b"\r\n", 200),
        (b"GET /live HTTP/1.1\r\n" + b"a: x\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
    ],
    ids=["most", "value", "name", "path", "unfinished", "line breaks", "most of them", "too many"],
)
async def test_headers_have_a_bound(head: bytes, status: int, quire: Harness) -> None:
    async with connected(quire) as (reader, writer):
        writer.write(head)
        assert await status_of(reader) == status


async def test_headers_after_a_body_in_chunks_have_a_bound(quire: Harness) -> None:
    async with connected(quire) as (reader, writer):
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\n0\r\n")
        for _ in range(64):
            writer.write(b"a: " + b"x" * 60_000 + b"\r\n")
        # What was not read resets the connection, with or without the answer.
        async with asyncio.timeout(60):
            with suppress(ConnectionError):
                assert (await reader.read())[:12] in (b"", b"HTTP/1.1 431")


@pytest.mark.parametrize(
    "sent", [POST + b"content-length: 1\r\n\r\n{zz\r\n\r\n", b"GET /live HTTP/1.1\r\n\r\nzz\r\n\r\n"]
)
async def test_a_bad_request_after_another_has_no_answer_before_its_own(sent: bytes, quire: Harness) -> None:
    async with connected(quire) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(60):
            answer = await reader.read()
        assert answer.count(b"HTTP/1.1 ") <= 1
        assert b"Invalid HTTP" not in answer


def parsed_requests() -> list[RequestResponseCycle]:
    """Those that are in memory."""
    return [one for one in gc.get_objects() if type(one) is RequestResponseCycle]


async def test_requests_that_wait_for_an_answer_are_not_parsed_yet(quire: Harness) -> None:
    count = 4_000
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    body = b'{"prompt": "a"}'
    async with connected(quire) as (reader, writer):
        writer.write(POST + b"content-length: %d\r\n\r\n%s" % (len(body), body))
        writer.write(b"GET /live HTTP/1.1\r\n\r\n" * (count - 1))
        writer.write(b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n")
        submit = await quire.scheduler.next("submit")
        assert len(parsed_requests()) < 50
        quire.scheduler.session.tokens(submit.key, encoded("hello world"), 0, end=length_end())
        async with asyncio.timeout(60):
            answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200 OK") == count + 1
        assert answers.index(b"hello world") < answers.index(b"HTTP/1.1 200 OK", 1)


@pytest.mark.parametrize("next_request", [b"GET /live HTTP/1.1\r\n", b"GET /live HTTP/1.1\r\na: " + b"x" * 1_000])
async def test_a_client_that_leaves_with_a_request_behind_another_cancels_the_first(
    next_request: bytes, quire: Harness
) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    body = b'{"prompt": "a"}'
    async with connected(quire) as (_, writer):
        writer.write(POST + b"content-length: %d\r\n\r\n%s%s\r\n" % (len(body), body, next_request))
        await quire.scheduler.next("submit")
    await quire.scheduler.next("cancel")


async def test_a_body_that_no_handler_has_read_takes_no_memory_after_the_answer(quire: Harness) -> None:
    async with connected(quire) as (reader, writer):
        writer.write(b"POST /nowhere HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 50_000)
        assert await status_of(reader) == 404
        await reader.readuntil(b"\r\n\r\n")
        assert sum(len(one.body) for one in parsed_requests()) == 0


async def test_floods_of_headers_take_no_memory(quire: Harness) -> None:
    async def flood(size: int) -> None:
        async with connected(quire) as (_, writer):
            try:
                writer.write(b"GET /live HTTP/1.1\r\na: ")
                for _ in range(size // MIB):
                    writer.write(b"x" * MIB)
                    await writer.drain()
            except ConnectionError:
                pass

    await asyncio.gather(*(flood(MIB) for _ in range(8)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await asyncio.gather(*(flood(60 * MIB) for _ in range(8)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60 * 1024  # KiB
    assert (await quire.http.get("/live")).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /li", b"\r\n", b"GET /live HTTP/1.1\r\n\r\nGET /li"])
async def test_a_connection_without_a_whole_head_is_closed(sent: bytes, model_directory: Path) -> None:
    async with running_gateway(model_directory, http_read_timeout=SHORT) as quire, connected(quire) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(60):
            assert (b"200 OK" in await reader.read()) == (b"\r\n\r\n" in sent)


async def test_a_body_that_does_not_come_is_a_timeout(model_directory: Path) -> None:
    async with running_gateway(model_directory, http_read_timeout=SHORT) as quire, connected(quire) as (reader, writer):
        writer.write(POST + b"content-length: 100\r\n\r\n{")
        async with asyncio.timeout(60):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer


async def test_a_connection_that_is_used_again_lasts_as_long_as_its_answer(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "_KEEP_ALIVE_SECONDS", SHORT)
    answer = answer_with(encoded("hello world"), stop_token_id=EOS)

    def answer_late(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        asyncio.get_running_loop().call_later(5 * SHORT, answer, session, submit)

    body = b'{"prompt": "a", "stream": true}'
    async with running_gateway(model_directory) as quire, connected(quire) as (reader, writer):
        quire.scheduler.script = answer_late
        for _ in range(2):
            writer.write(POST + b"content-length: %d\r\n\r\n%s" % (len(body), body))
            async with asyncio.timeout(60):
                assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")
        await closed(reader)


async def test_idle_connections_give_way_to_new_ones(model_directory: Path) -> None:
    async with running_gateway(model_directory, max_http_connections=8) as quire:
        idle = [await asyncio.open_connection("127.0.0.1", quire.gateway.http_port) for _ in range(50)]
        async with connected(quire) as (reader, writer):
            writer.write(b"GET /live HTTP/1.1\r\n\r\n")
            assert await status_of(reader) == 200
        for reader, _ in idle[: 50 - 8]:
            await closed(reader)
        for _, writer in idle:
            writer.close()


async def test_connections_of_an_address_give_way_to_new_ones_of_it(model_directory: Path) -> None:
    async with running_gateway(model_directory, max_http_connections_per_address=4) as quire:
        port = quire.gateway.http_port
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        async with connected(quire) as (reader, writer):
            writer.write(b"GET /live HTTP/1.1\r\n\r\n")
            assert await status_of(reader) == 200
        for reader, _ in idle[: 20 - 4]:
            await closed(reader)
        other_writer.write(b"GET /live HTTP/1.1\r\n\r\n")
        assert await status_of(other_reader) == 200
        for _, writer in (*idle, (None, other_writer)):
            writer.close()


async def test_a_connection_with_a_request_is_kept(model_directory: Path) -> None:
    async with (
        running_gateway(model_directory, max_http_connections=2) as quire,
        connected(quire) as (reader, writer),
        connected(quire) as (other, other_writer),
    ):
        for one in (writer, other_writer):
            one.write(POST + b"expect: 100-continue\r\ncontent-length: 1\r\n\r\n")
        assert [await status_of(one) for one in (reader, other)] == [100, 100]
        async with connected(quire) as (third, _):
            await closed(third)
        for received, sent in ((reader, writer), (other, other_writer)):
            sent.write(b"{")
            await received.readuntil(b"\r\n")
            assert await status_of(received) == 400


@asynccontextmanager
async def unread(quire: Harness) -> AsyncIterator[None]:
    """A client that reads no answers, and has sent requests until the gateway took no more."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", quire.gateway.http_port))
        with suppress(TimeoutError, ConnectionError):  # the gateway's buffers, and the system's, are full
            while True:
                async with asyncio.timeout(2):
                    await loop.sock_sendall(client, b"GET /metrics HTTP/1.1\r\na: " + b"x" * 8_000 + b"\r\n\r\n")
        yield


async def test_connections_whose_clients_do_not_read_give_way_to_new_ones(model_directory: Path) -> None:
    async with (
        running_gateway(model_directory, max_http_connections=2, http_read_timeout=1) as quire,
        unread(quire),
        unread(quire),
    ):
        answer = b""
        async with asyncio.timeout(60):
            while not answer:
                async with connected(quire) as (reader, writer):
                    writer.write(b"GET /live HTTP/1.1\r\n\r\n")
                    with suppress(ConnectionError):
                        answer = await reader.readline()
        assert answer.startswith(b"HTTP/1.1 200 ")
