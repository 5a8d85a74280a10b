"""The proxy forwards all data without a fault, and applies each kind of fault."""

import asyncio
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from tests.chaos.proxy import NO_FAULT, Link, LinkFault

LONG = 0.3  # seconds that a fault lasts; no test depends on the exact time


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100_000):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with Link(f"{host}:{port}") as link:
        yield link
    server.close()
    await server.wait_closed()


async def dial(link: Link) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = link.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def echoed(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], data: bytes) -> bytes:
    reader, writer = connection
    writer.write(data)
    async with asyncio.timeout(60):
        return await reader.readexactly(len(data))


async def test_all_data_and_the_eof_are_forwarded_in_order(link: Link) -> None:
    reader, writer = await dial(link)
    data = bytes(range(256)) * 4_000
    writer.write(data)
    writer.write_eof()
    async with asyncio.timeout(60):
        assert await reader.read(-1) == data
    writer.close()
    assert link.last_response_at <= monotonic()


async def test_open_and_new_connections_are_reset(link: Link) -> None:
    before = await dial(link)
    assert await echoed(before, b"one") == b"one"
    link.fault = LinkFault(is_reset=True)
    with pytest.raises(ConnectionResetError):
        await before[0].read(1)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await echoed(await dial(link), b"two")
    link.fault = NO_FAULT
    after = await dial(link)
    assert await echoed(after, b"three") == b"three"
    after[1].close()


async def test_a_stalled_link_forwards_its_data_after_the_fault(link: Link) -> None:
    connection = await dial(link)
    assert await echoed(connection, b"one") == b"one"
    link.fault = LinkFault(is_stalled=True)
    connection[1].write(b"two")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(connection[0].read(1), LONG)
    link.fault = NO_FAULT
    assert await connection[0].readexactly(3) == b"two"
    connection[1].close()


async def test_a_delay_applies_in_each_direction_and_does_not_add_up(link: Link) -> None:
    connection = await dial(link)
    link.fault = LinkFault(delay=0.5)
    started = monotonic()
    for _ in range(20):
        connection[1].write(b"x")
        await asyncio.sleep(0.005)
    await connection[0].readexactly(20)
    assert 0.99 < monotonic() - started < 10  # 40 delays one after the other would be 20 s
    connection[1].close()


async def test_a_throttled_link_has_full_speed_again_after_the_fault(link: Link) -> None:
    connection = await dial(link)
    link.fault = LinkFault(bytes_per_second=10_000)
    started = monotonic()
    assert await echoed(connection, bytes(3_000)) == bytes(3_000)
    assert monotonic() - started > 0.25
    connection[1].write(bytes(500_000))  # would take 50 s
    await asyncio.sleep(LONG)
    link.fault = NO_FAULT
    async with asyncio.timeout(60):
        await connection[0].readexactly(500_000)
    connection[1].close()


async def test_a_connection_to_a_missing_target_is_reset() -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    server.close()
    await server.wait_closed()
    async with Link(f"{host}:{port}") as link:
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await echoed(await dial(link), b"anyone?")
