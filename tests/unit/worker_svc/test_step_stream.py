"""A superseded stream sends no more responses, and its queued steps do not run."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.worker.v1 import worker_pb2 as pb
from worker_service import new_sequence, scheduled
from worker_svc.device_thread import DeviceThread
from worker_svc.memory_monitor import MemoryPressure
from worker_svc.step import SequenceResult, Step, StepOutcome
from worker_svc.step_stream import ProtocolViolation, StepStream


class HeldRunner:
    """Launches steps that are done when released."""

    def __init__(self) -> None:
        self.num_launched = 0
        self.two_launched = threading.Event()
        self.let_go = threading.Event()

    def reset(self) -> None:
        pass

    def launch(self, step: Step) -> "HeldRunner":
        self.num_launched += 1
        if self.num_launched == 2:
            self.two_launched.set()
        return self

    def is_done(self) -> bool:
        return self.let_go.is_set()

    def wait(self) -> None:
        assert self.let_go.wait(timeout=30)

    def finish(self, launched: "HeldRunner") -> StepOutcome:
        self.wait()
        return StepOutcome([], 0.0)


class RunnerOfNothing(HeldRunner):
    """Returns an outcome that no response can hold."""

    def finish(self, launched: HeldRunner) -> StepOutcome:
        return StepOutcome(cast(Any, [None]), 0.0)


async def test_a_step_that_cannot_be_answered_ends_the_stream() -> None:
    runner, device = RunnerOfNothing(), DeviceThread()
    runner.let_go.set()
    forever = asyncio.Event()

    async def requests() -> AsyncIterator[pb.StepRequest]:
        yield pb.StepRequest(epoch=1, generation=1, step_id=1)
        await forever.wait()

    responses = StepStream(1, 1, cast(Any, runner), device).responses(requests())
    await anext(responses)
    with pytest.raises((TypeError, AttributeError)):
        await anext(responses)
    device.close()


class RunnerOfEmptySteps(HeldRunner):
    """Its steps have no sequences."""

    def finish(self, launched: HeldRunner) -> StepOutcome:
        return StepOutcome([], 0.0)


async def test_responses_have_what_was_measured_of_the_memory() -> None:
    runner, device = RunnerOfEmptySteps(), DeviceThread()
    runner.let_go.set()
    measured = [None, MemoryPressure.HIGH, None, MemoryPressure.NONE]

    async def requests() -> AsyncIterator[pb.StepRequest]:
        for step_id in range(1, 5):
            yield pb.StepRequest(epoch=1, generation=1, step_id=step_id)

    stream = StepStream(1, 1, cast(Any, runner), device, take_pressure=lambda: measured.pop(0))
    _, *responses = [response async for response in stream.responses(requests())]
    assert [response.result.memory_pressure for response in responses] == [
        pb.MEMORY_PRESSURE_UNSPECIFIED,
        pb.MEMORY_PRESSURE_HIGH,
        pb.MEMORY_PRESSURE_UNSPECIFIED,
        pb.MEMORY_PRESSURE_NONE,
    ]
    device.close()


class RunnerOfValues(HeldRunner):
    """Returns a value for the first sequence of each step, and nothing for the others."""

    def launch(self, step: Step) -> HeldRunner:
        self.step = step
        return super().launch(step)

    def finish(self, launched: HeldRunner) -> StepOutcome:
        ids = [part.sequence_id for part in self.step.scheduled]
        return StepOutcome([SequenceResult(number, [], value=[1.0] if number == ids[0] else ()) for number in ids], 0.0)


async def test_a_sequence_ends_with_its_value_and_so_does_its_span(spans: InMemorySpanExporter) -> None:
    runner, device = RunnerOfValues(), DeviceThread()
    runner.let_go.set()
    is_answered, forever = asyncio.Event(), asyncio.Event()
    traced = [new_sequence(number, traceparent=f"00-{number:032x}-b7ad6b7169203331-01") for number in (1, 2)]

    async def requests() -> AsyncIterator[pb.StepRequest]:
        schedule = scheduled((1, 0, 5), (2, 0, 5))
        yield pb.StepRequest(epoch=1, generation=1, step_id=1, new_sequences=traced, scheduled=schedule)
        await is_answered.wait()
        yield pb.StepRequest(epoch=1, generation=1, step_id=2, scheduled=scheduled((2, 5, 1)))
        await forever.wait()

    stream = StepStream(1, 1, cast(Any, runner), device)
    responses = stream.responses(requests())
    await anext(responses)
    await anext(responses)
    await asyncio.sleep(0)  # spans end after the response
    assert [span.context.trace_id for span in spans.get_finished_spans() if span.context is not None] == [1]
    assert stream.has_sequences
    is_answered.set()
    await anext(responses)
    assert not stream.has_sequences
    await responses.aclose()
    device.close()


async def test_a_superseded_stream_neither_launches_nor_answers_what_is_left() -> None:
    runner, device = HeldRunner(), DeviceThread()
    all_queued, forever = asyncio.Event(), asyncio.Event()

    async def requests() -> AsyncIterator[pb.StepRequest]:
        for step_id in (1, 2, 3):
            yield pb.StepRequest(epoch=1, generation=1, step_id=step_id)
        all_queued.set()
        await forever.wait()

    stream = StepStream(1, 1, cast(Any, runner), device)
    responses = stream.responses(requests())
    assert (await anext(responses)).WhichOneof("outcome") == "ready"
    next_answer = asyncio.ensure_future(anext(responses))
    await all_queued.wait()
    await asyncio.to_thread(runner.two_launched.wait)

    stream.supersede(2)
    runner.let_go.set()
    with pytest.raises(ProtocolViolation, match="superseded by generation 2"):
        await next_answer
    await device.run(lambda: None)  # behind all that was queued
    assert runner.num_launched == 2
    device.close()
