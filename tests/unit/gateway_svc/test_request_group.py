"""The wait of a call for the chunks of its requests."""

import asyncio
from typing import Any, cast

import pytest

from gateway_svc.change_signal import ChangeSignal
from gateway_svc.output import Chunk
from gateway_svc.request_errors import cancelled
from gateway_svc.request_group import ClientDisconnected, RequestGroup
from svc_common.errors import QuireError, Reason


class FakeRequest:
    """A request whose events a test sends."""

    def __init__(self, signal: ChangeSignal) -> None:
        self.failure: QuireError | None = None
        self.is_accepted = True
        self.is_finished = False
        self.num_looks = 0
        self._signal = signal
        self._pending: list[Chunk] = []

    def pop_pending(self) -> list[Chunk]:
        self.num_looks += 1
        chunks, self._pending = self._pending, []
        return chunks

    def send(self, text: str, *, is_last: bool = False) -> None:
        self._pending.append(Chunk(0, 0, text))
        self.is_finished = is_last
        self._signal.set()

    def fail(self) -> None:
        self.failure, self.is_finished = cancelled(), True
        self._signal.set()


def group_of(num_requests: int) -> tuple[RequestGroup, list[FakeRequest]]:
    signal = ChangeSignal()
    group, requests = RequestGroup(signal), [FakeRequest(signal) for _ in range(num_requests)]
    group.requests = cast(Any, requests)
    return group, requests


async def texts(group: RequestGroup) -> list[tuple[int, str]]:
    async with asyncio.timeout(10):
        return [(prompt_index, chunk.text) for prompt_index, chunk in await group.next()]


async def test_chunks_come_with_their_prompt_until_all_requests_have_ended() -> None:
    group, (first, second) = group_of(2)
    first.send("a")
    second.send("b", is_last=True)
    assert await texts(group) == [(0, "a"), (1, "b")]
    first.send("c", is_last=True)
    assert await texts(group) == [(0, "c")]
    assert await texts(group) == await texts(group) == []


async def test_a_failure_comes_after_the_chunks_before_it_while_others_run() -> None:
    group, (first, second) = group_of(2)
    first.send("a")
    second.fail()
    assert await texts(group) == [(0, "a")]
    with pytest.raises(QuireError) as error:
        await texts(group)
    assert error.value.reason is Reason.CANCELLED


async def test_a_wait_that_is_cancelled_loses_nothing() -> None:
    group, (request,) = group_of(1)
    wait = asyncio.create_task(group.next())
    await asyncio.sleep(0)
    wait.cancel()
    request.send("a")
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert await texts(group) == [(0, "a")]


async def test_each_change_is_looked_at_once() -> None:
    group, (request,) = group_of(1)
    for _ in range(3):
        request.send("a")
        assert await texts(group) == [(0, "a")]
    assert request.num_looks == 3


async def test_a_client_that_leaves_ends_the_wait() -> None:
    group, (request,) = group_of(1)
    request.send("a")
    assert await texts(group) == [(0, "a")]
    wait = asyncio.create_task(group.next())
    await asyncio.sleep(0)
    group.client_disconnected()
    for waiting in (wait, group.next()):
        with pytest.raises(ClientDisconnected):
            await asyncio.wait_for(waiting, 10)


async def test_a_client_that_has_left_does_not_wait_for_acceptance() -> None:
    group, (request,) = group_of(1)
    request.is_accepted = False
    group.client_disconnected()
    with pytest.raises(ClientDisconnected):
        await asyncio.wait_for(group.accepted(), 10)
