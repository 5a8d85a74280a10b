"""Clients of one tenant that send half messages, submit in the background, or never read, beside another tenant."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.asyncio.client import connect

from deployment import Deployment, deployment
from quire_client import AsyncClient
from tiny_model import make_model_directory

ALICE, BOB = "the-own-key-of-alice", "the-own-key-of-bob"
KEYS = "".join(f'[[keys]]\nkey = "{key}"\ntenant = "{key.rpartition("-")[2]}"\n' for key in (ALICE, BOB))
MIB = 2**20
BODY_MEMORY = 1 / 16  # GiB
MEMORY = 192 * MIB
"""What a gateway may take more while it is attacked: three times its memory for bodies."""
LONG = {"prompt": "hello", "max_tokens": 600, "ignore_eos": True, "stream": True, "logprobs": 5}
HALF = struct.pack(">BBQI", 0x81, 0xFF, 16 * MIB - 100, 0) + b"a" * (6 * MIB)


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("hostile")
    keys = directory / "keys.toml"
    keys.write_text(KEYS)
    with deployment(
        model=str(tiny_model),
        served_model_name="tiny",
        tokenizer=str(make_model_directory(directory / "tokenizer")),
        api_keys=str(keys),
        body_memory=str(BODY_MEMORY),
        max_sequences=8,
        num_blocks=2000,
        num_threads=1,
    ) as started:
        yield started


def memory(running: Deployment) -> int:
    """The gateway's memory in bytes."""
    (pid,) = (role["pid"] for name, role in running.state["roles"].items() if name.startswith("gateway"))
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 2**10


def host_and_port(running: Deployment) -> tuple[str, int]:
    split = urlsplit(running.http)
    assert split.hostname is not None
    assert split.port is not None
    return split.hostname, split.port


async def answer(running: Deployment, key: str) -> int:
    """The status of a request."""
    async with httpx.AsyncClient(base_url=running.http, trust_env=False, timeout=120) as client:
        body = {"prompt": "hello", "max_tokens": 5}
        return (await client.post("/v1/completions", json=body, headers={"x-api-key": key})).status_code


async def test_half_messages_of_websockets(running: Deployment) -> None:
    before, writers = memory(running), list[asyncio.StreamWriter]()
    handshake = (
        b"GET /v1/completions HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\nx-api-key: %s\r\n\r\n"
    ) % ALICE.encode()

    async def attack() -> bool:
        """Whether the gateway keeps the connection, with a part of a message."""
        reader, writer = await asyncio.open_connection(*host_and_port(running))
        writers.append(writer)
        writer.write(handshake)
        await reader.readuntil(b"\r\n\r\n")
        try:
            writer.write(HALF)
            await writer.drain()
            await asyncio.wait_for(reader.read(1), 20)
        except TimeoutError:
            return True
        except OSError:
            pass
        return False

    kept = await asyncio.gather(*(attack() for _ in range(60)))
    assert sum(kept) <= BODY_MEMORY * 2**30 / (6 * MIB)
    assert memory(running) - before < MEMORY
    assert await answer(running, BOB) == 200
    for writer in writers:
        writer.close()


@asynccontextmanager
async def unread_events(running: Deployment) -> AsyncIterator[None]:
    body = json.dumps(LONG).encode()
    reader, writer = await asyncio.open_connection(*host_and_port(running), limit=1)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-api-key: %s\r\n"
    writer.write(head % ALICE.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    await reader.readexactly(1)
    yield
    writer.close()


@asynccontextmanager
async def unread_messages(running: Deployment) -> AsyncIterator[None]:
    host, port = host_and_port(running)
    async with AsyncExitStack() as stack:
        connection = await connect(
            f"ws://{host}:{port}/v1/completions",
            additional_headers={"x-api-key": ALICE},
            compression=None,
            max_queue=1,
            ping_interval=None,
        )
        stack.callback(connection.transport.abort)
        await connection.send(json.dumps(LONG))
        yield


@asynccontextmanager
async def unread_responses(running: Deployment) -> AsyncIterator[None]:
    async with AsyncClient(running.grpc, api_key=ALICE, timeout=120) as client:
        chunks = aiter(client.stream("hello", max_tokens=600, ignore_eos=True, logprobs=5))
        await anext(chunks)
        yield
        del chunks  # until here: without a reference the call would be cancelled


@pytest.mark.parametrize("unread", [unread_events, unread_messages, unread_responses])
async def test_clients_that_never_read(
    unread: Callable[[Deployment], AbstractAsyncContextManager[None]], running: Deployment
) -> None:
    before = memory(running)
    async with AsyncExitStack() as stack:
        for opened in [unread(running) for _ in range(24)]:
            await stack.enter_async_context(opened)
        assert await answer(running, BOB) == 200
        assert memory(running) - before < MEMORY
        await running.rest()  # what nobody reads is computed all the same, and holds no slot and no block
        assert await answer(running, BOB) == 200
        assert memory(running) - before < MEMORY


async def test_responses_in_the_background(running: Deployment) -> None:
    before = memory(running)
    async with httpx.AsyncClient(
        base_url=running.http, trust_env=False, timeout=120, headers={"x-api-key": ALICE}
    ) as client:

        async def submit() -> str:
            body = {"input": "hello", "background": True, "max_output_tokens": 2000}
            response = await client.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text
            return str(response.json()["id"])

        ids = await asyncio.gather(*(submit() for _ in range(200)))
        assert await answer(running, BOB) == 200
        assert memory(running) - before < MEMORY
        other = {"x-api-key": BOB}
        assert (await client.get(f"/v1/responses/{ids[0]}", headers=other)).status_code == 404
        assert (await client.post(f"/v1/responses/{ids[0]}/cancel", headers=other)).status_code == 404
        await asyncio.gather(*(client.post(f"/v1/responses/{one}/cancel") for one in ids))
    await running.rest()
