"""TLS connections whose handshake does not come: on uvloop, which gateways run on, and on asyncio's own loop."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import uvloop

from certificates import Authority
from gateway_svc.gateway import Gateway
from quire_client import AsyncClient
from tls_gateway import NAMES, ReplaceableFiles, gateway_with_tls, trusting

SHORT = 0.3  # seconds
LONG = 600.0
CLOSE_SECONDS = 45.0  # less than the 60 s after which event loops give up a handshake by themselves
GET = b"GET /live HTTP/1.1\r\n\r\n"
HANDSHAKE_PART = b"\x16\x03\x01\x02"

Run = Callable[[Coroutine[Any, Any, None]], None]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    def run_on_loop(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(test)

    return run_on_loop


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> ReplaceableFiles:
    files = ReplaceableFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    files.replace_by(authority.issue("gateway", NAMES))
    return files


async def connected(port: int, **options: Any) -> Connection:
    async with asyncio.timeout(60):
        return await asyncio.open_connection("127.0.0.1", port, **options)


async def closed(reader: asyncio.StreamReader) -> None:
    """Waits until the gateway closes the connection."""
    async with asyncio.timeout(CLOSE_SECONDS):
        with suppress(ConnectionError):
            while await reader.read(2**16):
                pass


async def answers(gateway: Gateway, authority: Authority) -> None:
    """A new client is answered."""
    async with httpx.AsyncClient(verify=trusting(authority), trust_env=False, timeout=60) as http:
        for _ in range(2):
            assert (await http.get(f"https://127.0.0.1:{gateway.http_port}/live")).status_code == 200


@pytest.mark.parametrize("sent", [b"", HANDSHAKE_PART, GET], ids=["idle", "part", "plain"])
def test_a_connection_without_a_handshake_is_closed(
    sent: bytes, run: Run, model_directory: Path, files: ReplaceableFiles
) -> None:
    async def test() -> None:
        async with gateway_with_tls(model_directory, files, http_read_timeout=SHORT) as gateway:
            reader, writer = await connected(gateway.http_port)
            writer.write(sent)
            await closed(reader)
            writer.close()

    run(test())


def test_a_request_in_plain_text_is_answered_that_the_port_has_tls(
    run: Run, model_directory: Path, authority: Authority, files: ReplaceableFiles
) -> None:
    async def test() -> None:
        async with gateway_with_tls(model_directory, files) as gateway:
            async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
                url = f"http://127.0.0.1:{gateway.http_port}/v1/completions"
                response = await http.post(url, json={"prompt": "a" * 1_000})
            assert (response.status_code, response.text) == (400, "this port has TLS: use https://\n")
            await answers(gateway, authority)

    run(test())


@pytest.mark.parametrize("sent", [b"", HANDSHAKE_PART], ids=["idle", "part"])
def test_connections_without_a_handshake_give_way_to_new_ones(
    sent: bytes, run: Run, model_directory: Path, files: ReplaceableFiles, authority: Authority
) -> None:
    async def test() -> None:
        async with gateway_with_tls(model_directory, files, max_http_connections=8, http_read_timeout=LONG) as gateway:
            opened = [await connected(gateway.http_port) for _ in range(200)]
            for _, writer in opened:
                writer.write(sent)
            await answers(gateway, authority)
            for reader, _ in opened[: 200 - 8]:
                await closed(reader)
            for _, writer in opened:
                writer.close()

    run(test())


def test_connections_of_an_address_without_a_handshake_give_way_to_new_ones_of_it(
    run: Run, model_directory: Path, files: ReplaceableFiles, authority: Authority
) -> None:
    async def test() -> None:
        async with gateway_with_tls(
            model_directory, files, max_http_connections_per_address=4, http_read_timeout=LONG
        ) as gateway:
            other, other_writer = await connected(gateway.http_port, local_addr=("127.0.0.2", 0))
            opened = [await connected(gateway.http_port) for _ in range(20)]
            await answers(gateway, authority)
            for reader, _ in opened[: 20 - 4]:
                await closed(reader)
            assert not other.at_eof()
            for _, writer in (*opened, (other, other_writer)):
                writer.close()

    run(test())


def test_connections_that_do_not_answer_the_end_of_tls_give_way_as_well(
    run: Run, model_directory: Path, files: ReplaceableFiles, authority: Authority
) -> None:
    """A client that answers no close_notify does not keep its connection."""

    async def test() -> None:
        async with gateway_with_tls(model_directory, files, max_http_connections=8, http_read_timeout=LONG) as gateway:
            opened = [await handshaken(gateway, authority) for _ in range(20)]
            await answers(gateway, authority)
            for (reader, _), _ in opened[: 20 - 8]:
                await closed(reader)
            for (_, writer), _ in opened:
                writer.close()

    run(test())


def test_a_request_may_arrive_with_the_end_of_the_handshake(
    run: Run, model_directory: Path, files: ReplaceableFiles, authority: Authority
) -> None:
    """One TCP segment has the client's Finished message and its request."""

    async def test() -> None:
        async with gateway_with_tls(model_directory, files) as gateway:
            (reader, writer), tls = await handshaken(gateway, authority, GET)
            async with asyncio.timeout(60):
                assert (await tls.received(reader)).startswith(b"HTTP/1.1 200 ")
            writer.close()

    run(test())


class ClientTls:
    """TLS of a client over a connection in plain text."""

    def __init__(self, authority: Authority) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trusting(authority).wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    async def shake_hands(self, connection: Connection, request: bytes) -> None:
        """Sends the request in the segment of the last message of the handshake."""
        reader, writer = connection
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(self._outgoing.read())
                self._incoming.write(await reader.read(2**16))
        if request:
            self._tls.write(request)
        writer.write(self._outgoing.read())

    async def received(self, reader: asyncio.StreamReader) -> bytes:
        """What the other side sends first."""
        while True:
            try:
                return self._tls.read()
            except ssl.SSLWantReadError:
                self._incoming.write(await reader.read(2**16))


async def handshaken(gateway: Gateway, authority: Authority, request: bytes = b"") -> tuple[Connection, ClientTls]:
    connection, tls = await connected(gateway.http_port), ClientTls(authority)
    async with asyncio.timeout(60):
        await tls.shake_hands(connection, request)
    return connection, tls


def test_a_gateway_that_cannot_accept_a_connection_tries_again(
    run: Run,
    model_directory: Path,
    files: ReplaceableFiles,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE]

    def accept_later(listener: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise OSError(failures.pop(), "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)

    async def test() -> None:
        async with gateway_with_tls(model_directory, files) as gateway:
            await answers(gateway, authority)

    run(test())
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == ["cannot accept connections"]


@pytest.mark.parametrize("sent", [b"", HANDSHAKE_PART], ids=["idle", "part"])
async def test_a_grpc_connection_without_a_handshake_is_closed(
    sent: bytes, model_directory: Path, files: ReplaceableFiles
) -> None:
    async with gateway_with_tls(model_directory, files, grpc_read_timeout=SHORT) as gateway:
        reader, writer = await connected(gateway.grpc_port)
        writer.write(sent)
        await closed(reader)
        writer.close()


async def test_grpc_connections_without_a_handshake_count(
    model_directory: Path, files: ReplaceableFiles, authority: Authority
) -> None:
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    async with gateway_with_tls(model_directory, files, max_grpc_connections=8, grpc_read_timeout=LONG) as gateway:
        opened = [await connected(gateway.grpc_port) for _ in range(20)]
        for reader, _ in opened[8:]:
            await closed(reader)
        assert not any(reader.at_eof() for reader, _ in opened[:8])
        for _, writer in opened:
            writer.close()
        async with AsyncClient(f"127.0.0.1:{gateway.grpc_port}", credentials=credentials) as client:
            await client.models()
