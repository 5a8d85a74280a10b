"""The proxy lets all through while it is whole, and does what each trouble says."""

import asyncio
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from tests.chaos.proxy import WHOLE, Link, Trouble

LONG = 0.3  # seconds of a trouble: what it does to the connection is seen, not how long it takes


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


async def say(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], data: bytes) -> bytes:
    reader, writer = connection
    writer.write(data)
    async with asyncio.timeout(60):
        return await reader.readexactly(len(data))


async def test_all_comes_through_in_order_to_the_end(link: Link) -> None:
    reader, writer = await dial(link)
    data = bytes(range(256)) * 4_000
    writer.write(data)
    writer.write_eof()
    async with asyncio.timeout(60):
        assert await reader.read(-1) == data
    writer.close()
    assert link.answered_at <= monotonic()


async def test_a_cut_resets_what_is_open_and_what_is_tried(link: Link) -> None:
    before = await dial(link)
    assert await say(before, b"one") == b"one"
    link.trouble = Trouble(is_truncated=True)
    with pytest.raises(ConnectionResetError):
        await before[0].read(1)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await say(await dial(link), b"two")
    link.trouble = WHOLE
    after = await dial(link)
    assert await say(after, b"three") == b"three"
    after[1].close()


async def test_a_held_link_keeps_what_is_said_until_it_is_whole(link: Link) -> None:
    connection = await dial(link)
    assert await say(connection, b"one") == b"one"
    link.trouble = Trouble(is_held=True)
    connection[1].write(b"two")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(connection[0].read(1), LONG)
    link.trouble = WHOLE
    assert await connection[0].readexactly(3) == b"two"
    connection[1].close()


async def test_a_delay_counts_each_way_and_does_not_add_up(link: Link) -> None:
    connection = await dial(link)
    link.trouble = Trouble(delay=0.5)
    started = monotonic()
    for _ in range(20):
        connection[1].write(b"x")
        await asyncio.sleep(0.005)
    await connection[0].readexactly(20)
    assert 0.99 < monotonic() - started < 10  # 40 delays one after the other would be 20 s
    connection[1].close()


async def test_a_throttled_link_is_slow_and_is_whole_again_at_once(link: Link) -> None:
    connection = await dial(link)
    link.trouble = Trouble(bytes_per_second=10_000)
    started = monotonic()
    assert await say(connection, bytes(3_000)) == bytes(3_000)
    assert monotonic() - started > 0.25
    connection[1].write(bytes(500_000))  # would take 50 s
    await asyncio.sleep(LONG)
    link.trouble = WHOLE
    async with asyncio.timeout(60):
        await connection[0].readexactly(500_000)
    connection[1].close()


async def test_a_target_that_is_gone_is_told_by_a_reset() -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    server.close()
    await server.wait_closed()
    async with Link(f"{host}:{port}") as link:
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await say(await dial(link), b"anyone?")
