"""Messages that wait for a stream are taken together."""

import asyncio

import pytest

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from svc_common.message_queue import MAX_TAKEN, MAX_TAKEN_BYTES, MessageQueue

Queue = MessageQueue[scheduler_v1.Cancel]


def cancel(number: int, num_bytes: int = 0) -> scheduler_v1.Cancel:
    return scheduler_v1.Cancel(key=str(number), submission_id="a" * num_bytes)


def filled(*messages: scheduler_v1.Cancel) -> Queue:
    queue: Queue = MessageQueue()
    for message in messages:
        queue.put(message)
    return queue


async def keys(queue: Queue, most: int = MAX_TAKEN) -> list[int]:
    async with asyncio.timeout(60):
        return [int(message.key) for message in await queue.take(most)]


@pytest.mark.parametrize(("number", "most"), [(1, MAX_TAKEN), (63, MAX_TAKEN), (200, MAX_TAKEN), (5, 1), (5, 2)])
async def test_messages_are_taken_in_their_order(number: int, most: int) -> None:
    queue = filled(*map(cancel, range(number)))
    queue.close()
    taken = []
    while found := await keys(queue, most):
        taken.append(found)
    assert [one for found in taken for one in found] == list(range(number))
    assert [len(found) for found in taken[:-1]] == [most] * (len(taken) - 1)


async def test_what_is_taken_together_is_small() -> None:
    sizes = [10, MAX_TAKEN_BYTES // 2, MAX_TAKEN_BYTES // 2, MAX_TAKEN_BYTES * 3, 10, 10]
    queue = filled(*(cancel(number, size) for number, size in enumerate(sizes)))
    assert [await keys(queue) for _ in range(4)] == [[0, 1], [2], [3], [4, 5]]


async def test_what_does_not_fit_the_first_one_is_taken_later() -> None:
    queue: Queue = MessageQueue(lambda first, other: int(first.key) // 10 == int(other.key) // 10)
    for number in (1, 2, 11, 3, 12, 13):
        queue.put(cancel(number))
    assert [await keys(queue) for _ in range(4)] == [[1, 2], [11], [3], [12, 13]]


async def test_a_reader_waits_for_the_next_message() -> None:
    queue = filled()
    reader = asyncio.create_task(keys(queue))
    await asyncio.sleep(0)
    assert not reader.done()
    queue.put(cancel(7))
    assert await reader == [7]
    reader = asyncio.create_task(keys(queue))
    await asyncio.sleep(0)
    queue.close()
    assert await reader == []
    assert await keys(queue) == []


async def test_a_reader_that_is_cancelled_loses_no_message() -> None:
    queue = filled()
    reader = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.put(cancel(1))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await keys(queue) == [1]


async def test_a_message_with_a_delay_is_taken_with_the_next_one() -> None:
    queue = filled()
    reader = asyncio.create_task(keys(queue))
    await asyncio.sleep(0)
    for number in (1, 2):
        queue.put(cancel(number), delay=60.0)
    await asyncio.sleep(0.01)
    assert not reader.done()
    queue.put(cancel(3))
    assert await reader == [1, 2, 3]


async def test_a_message_with_a_delay_is_taken_alone_after_that() -> None:
    queue = filled()
    for number in (1, 2):  # the second time as well as the first
        reader = asyncio.create_task(keys(queue))
        await asyncio.sleep(0)
        started = asyncio.get_running_loop().time()
        queue.put(cancel(number), delay=0.01)
        assert await reader == [number]
        assert asyncio.get_running_loop().time() - started > 0.005


async def test_a_delay_ends_when_its_message_is_taken() -> None:
    queue = filled()
    queue.put(cancel(1), delay=0.01)
    assert await keys(queue) == [1], "a reader that comes later does not wait"
    reader = asyncio.create_task(keys(queue))
    await asyncio.sleep(0)
    queue.put(cancel(2), delay=60.0)
    await asyncio.sleep(0.03)
    assert not reader.done()
    queue.close()
    assert await reader == [2]
