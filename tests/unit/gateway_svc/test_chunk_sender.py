"""Chunks are written in the turn of the event loop in which they come."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from gateway_svc.change_signal import ChangeSignal
from gateway_svc.chunk_sender import ChunkSender
from gateway_svc.output import Chunk
from gateway_svc.request_errors import cancelled
from gateway_svc.request_group import RequestGroup
from svc_common.errors import QuireError


class Client:
    """A call's context, and the call's one request. A write ends when the test says so."""

    def __init__(self) -> None:
        self.failure: QuireError | None = None
        self.is_finished = False
        self.sent: list[str] = []
        self.unended: list[asyncio.Future[None]] = []
        self.signal = ChangeSignal()
        self.pending: list[Chunk] = []
        self.group = RequestGroup(self.signal)
        self.group.requests = cast(Any, [self])
        self.sender = ChunkSender(cast(Any, self), self.group, lambda chunk: chunk.text)

    def pop_pending(self) -> list[Chunk]:
        chunks, self.pending = self.pending, []
        return chunks

    def come(self, *texts: str, is_last: bool = False) -> None:
        self.pending += [Chunk(0, 0, text) for text in texts]
        self.is_finished = is_last
        self.signal.set()

    async def write(self, response: str) -> None:
        self.sent.append(response)
        self.unended.append(written := asyncio.get_running_loop().create_future())
        await written

    async def end_write(self, error: Exception | None = None) -> None:
        written = self.unended.pop()
        assert not self.unended, "one write at a time"
        if error is None:
            written.set_result(None)
        else:
            written.set_exception(error)
        await asyncio.sleep(0)

    async def start(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self.sender.run())
        await asyncio.sleep(0)
        return task


async def ended(task: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(10):
        await task


async def test_a_chunk_is_written_before_its_delivery_returns_and_the_next_one_when_the_write_has_ended() -> None:
    client = Client()
    client.come("a")
    task = await client.start()
    assert client.sent == ["a"], "what came before is written at the beginning"
    await client.end_write()
    client.come("b")
    assert client.sent == ["a", "b"]
    client.come("c", "d")
    assert client.sent == ["a", "b"], "the write of b has not ended"
    await client.end_write()
    assert client.sent == ["a", "b", "c"]
    client.come("e", is_last=True)
    for _ in range(3):
        assert not task.done()
        await client.end_write()
    await ended(task)
    assert client.sent == ["a", "b", "c", "d", "e"]
    assert await client.group.next() == []


async def test_a_chunk_that_comes_between_the_end_of_a_write_and_the_next_turn_of_the_loop_is_written_once() -> None:
    client = Client()
    task = await client.start()
    client.come("a")
    client.come("b")
    client.unended.pop().set_result(None)
    client.come("c")
    await asyncio.sleep(0)
    assert client.sent == ["a", "b"]
    for _ in range(2):
        await client.end_write()
        assert not task.done()
    client.come("d", is_last=True)
    await client.end_write()
    await ended(task)
    assert client.sent == ["a", "b", "c", "d"]


async def test_a_request_that_fails_ends_it_after_its_last_chunk_and_the_group_raises_the_error() -> None:
    client = Client()
    task = await client.start()
    client.failure = cancelled()
    client.come("a", is_last=True)
    await client.end_write()
    await ended(task)
    assert client.sent == ["a"]
    with pytest.raises(QuireError):
        await client.group.next()


async def test_an_error_of_a_write_ends_it_and_nothing_more_is_written() -> None:
    client = Client()
    task = await client.start()
    client.come("a", "b")
    await client.end_write(grpc.aio.InternalError("the client has left"))
    with pytest.raises(grpc.aio.InternalError):
        await ended(task)
    client.come("c")
    assert client.sent == ["a"]


async def test_an_error_of_rendering_reaches_the_call_and_not_the_delivery() -> None:
    client = Client()
    client.sender = ChunkSender(cast(Any, client), client.group, lambda chunk: cast(Any, chunk).missing)
    task = await client.start()
    client.come("a")
    with pytest.raises(AttributeError):
        await ended(task)


async def test_a_client_that_leaves_during_a_write_ends_the_call_at_once_and_the_write_without_a_trace() -> None:
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    client = Client()
    task = await client.start()
    client.come("a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(task)
    client.come("b", is_last=True)
    await client.end_write(grpc.aio.InternalError("the client has left"))
    assert client.sent == ["a"]
    assert not unhandled
    assert [chunk.text for _, chunk in await client.group.next()] == ["b"]
