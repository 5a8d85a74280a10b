"""The end of a stream while several requests write to it."""

import asyncio
from typing import Any

from gateway_svc.open_inference.response_stream import ResponseStream
from quire.open_inference.v2 import open_inference_pb2 as pb


class SlowContext:
    """Writes that last until they may end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.num_written = 0

    async def write(self, _: pb.ModelStreamInferResponse) -> None:
        self.has_begun.set()
        await self.may_end.wait()
        self.num_written += 1


async def test_a_write_that_has_begun_is_not_cancelled_and_nothing_follows_it() -> None:
    context: Any = SlowContext()
    stream = ResponseStream(context)

    async def respond() -> None:
        while True:
            await stream.write(pb.ModelStreamInferResponse())

    async def generate() -> None:
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(work()) for work in (respond, respond, generate)]
    await context.has_begun.wait()
    ending = asyncio.create_task(stream.end(tasks))
    await asyncio.wait(tasks[1:], timeout=60)
    assert [task.done() for task in tasks] == [False, True, True]
    context.may_end.set()
    async with asyncio.timeout(60):
        await ending
    assert context.num_written == 1
    assert all(task.cancelled() for task in tasks)


async def test_responses_are_written_one_by_one() -> None:
    context: Any = SlowContext()
    context.may_end.set()
    stream = ResponseStream(context)
    await asyncio.gather(*(stream.write(pb.ModelStreamInferResponse()) for _ in range(3)))
    await stream.end([])
    assert context.num_written == 3
