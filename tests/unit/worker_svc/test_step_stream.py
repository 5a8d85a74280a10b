"""A superseded stream answers nothing more, and what it had queued does not run."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from quire.worker.v1 import worker_pb2 as pb
from worker_svc.device_thread import DeviceThread
from worker_svc.step import Step, StepOutcome
from worker_svc.step_stream import BadOrder, StepStream


class HeldRunner:
    """Runs each step until it is let go."""

    def __init__(self) -> None:
        self.steps_run = 0
        self.running = threading.Event()
        self.let_go = threading.Event()

    def reset(self) -> None:
        pass

    def step(self, step: Step) -> StepOutcome:
        self.steps_run += 1
        self.running.set()
        assert self.let_go.wait(timeout=30)
        return StepOutcome([], 0.0)


async def test_a_superseded_stream_neither_runs_nor_answers_what_is_left() -> None:
    runner, device = HeldRunner(), DeviceThread()
    both_queued, forever = asyncio.Event(), asyncio.Event()

    async def requests() -> AsyncIterator[pb.StepRequest]:
        for step_id in (1, 2):
            yield pb.StepRequest(epoch=1, generation=1, step_id=step_id)
        both_queued.set()
        await forever.wait()

    stream = StepStream(1, 1, cast(Any, runner), device)
    answers = stream.answers(requests())
    assert (await anext(answers)).WhichOneof("outcome") == "ready"
    next_answer = asyncio.ensure_future(anext(answers))
    await both_queued.wait()
    await asyncio.to_thread(runner.running.wait)

    stream.supersede(2)
    runner.let_go.set()
    with pytest.raises(BadOrder, match="superseded by generation 2"):
        await next_answer
    await device.run(lambda: None)  # behind all that was queued
    assert runner.steps_run == 1
    device.close()


async def test_time_between_steps_is_told_apart_from_time_in_them() -> None:
    device = DeviceThread()
    pause = threading.Event()
    await device.run(lambda: None)
    pause.wait(0.05)
    timed = await asyncio.wrap_future(device.submit(lambda: pause.wait(0.02)))
    assert timed.idle_seconds >= 0.05
    assert timed.busy_seconds >= 0.02
    device.close()
