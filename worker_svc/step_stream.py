"""One step stream: checks the order of its steps, runs them, and answers each."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from quire.worker.v1 import worker_pb2 as pb
from worker_svc.device_thread import DeviceThread, Timed
from worker_svc.errors import DeviceLost
from worker_svc.memory_monitor import MemoryPressure
from worker_svc.metrics import count_failed_step, count_step
from worker_svc.spans import SequenceSpans
from worker_svc.step import Step, StepOutcome
from worker_svc.wire import MalformedMessage, outcome_to_proto, pressure_to_proto, step_from_proto

if TYPE_CHECKING:
    from worker_svc.step_runner import StepRunner

logger = logging.getLogger("quire.worker")

StepFuture: TypeAlias = Future[Timed[StepOutcome]]


class ProtocolViolation(Exception):  # noqa: N818
    """A message that does not follow its predecessor, or is inconsistent. The text goes to the scheduler."""


class StepFailed(Exception):  # noqa: N818
    """A step raised. The state of its sequences is unknown: the stream ends, and the scheduler sends them again."""


class StepStream:
    """A generation of steps, on the event loop; the device thread launches and finishes the steps."""

    def __init__(
        self,
        epoch: int,
        generation: int,
        runner: "StepRunner",
        device: DeviceThread,
        take_pressure: Callable[[], MemoryPressure | None] = lambda: None,
    ) -> None:
        """`take_pressure` returns what was measured of the memory since its last call, if anything."""
        self._take_pressure = take_pressure
        self.epoch, self.generation = epoch, generation
        self._last_step_id = 0
        self._runner = runner
        self._device = device
        self._spans = SequenceSpans()
        self._loop = asyncio.get_running_loop()
        self._pending: set[StepFuture] = set()
        self._is_fully_read = False
        self._responses: asyncio.Queue[pb.StepResponse | Exception | None] = asyncio.Queue()
        self._is_open = True
        self._sequence_ids: set[int] = set()  # that have not ended

    async def responses(self, requests: AsyncIterator[pb.StepRequest]) -> AsyncGenerator[pb.StepResponse, None]:
        """Ready, then one response for each request, in order, until the requests end.

        Raises ProtocolViolation if a request does not follow its predecessor, and when the stream is superseded;
        StepFailed or DeviceLost if a step raised.
        """
        # Runs after the last steps of the generation before, which may still run.
        await self._device.run(self._runner.reset)
        yield pb.StepResponse(epoch=self.epoch, generation=self.generation, ready=pb.Ready())
        # Steps are read and queued while one runs, without waiting for its response.
        reading = asyncio.create_task(self._read(requests))
        try:
            while (response := await self._responses.get()) is not None:
                if isinstance(response, Exception):
                    raise response
                yield response
        finally:
            reading.cancel()

    @property
    def has_sequences(self) -> bool:
        """Whether the scheduler has sequences here."""
        return bool(self._sequence_ids)

    def supersede(self, generation: int) -> None:
        """Another stream has replaced this one: no more responses."""
        self.close()
        self._responses.put_nowait(ProtocolViolation(f"superseded by generation {generation}"))

    def close(self) -> None:
        """Drops the steps that were not launched, and ends the spans of all sequences."""
        self._is_open = False
        for future in self._pending:
            future.cancel()
        self._spans.close()

    async def _read(self, requests: AsyncIterator[pb.StepRequest]) -> None:
        try:
            async for request in requests:
                if not self._is_open:
                    return
                self._submit(request)
            self._is_fully_read = True
            self._end_if_done()
        except Exception as error:  # raised again by `responses`
            self._responses.put_nowait(error)

    def _submit(self, request: pb.StepRequest) -> None:
        if (request.epoch, request.generation) != (self.epoch, self.generation):
            raise ProtocolViolation(
                f"a step of epoch {request.epoch}, generation {request.generation} on the stream of epoch "
                f"{self.epoch}, generation {self.generation}"
            )
        if request.step_id != self._last_step_id + 1:
            raise ProtocolViolation(f"step {request.step_id} after step {self._last_step_id}")
        self._last_step_id = request.step_id
        try:
            step = step_from_proto(request)
        except MalformedMessage as error:
            raise ProtocolViolation(f"step {request.step_id} is malformed: {error}") from None
        self._sequence_ids.difference_update(step.finished_ids)
        self._sequence_ids.update(new.sequence_id for new in step.new_sequences)
        self._spans.begin_step(step)
        future = self._device.submit_step(partial(self._runner.launch, step), self._runner.finish)
        self._pending.add(future)
        future.add_done_callback(partial(self._respond_from_loop, request.step_id, step))

    def _respond_from_loop(self, step_id: int, step: Step, future: StepFuture) -> None:
        """Sends a step's response on the event loop, from the thread that finishes it: a future would cost one more
        iteration.
        """
        with suppress(RuntimeError):  # the loop is closed: no responses any more
            self._loop.call_soon_threadsafe(self._respond, step_id, step, future)

    def _end_if_done(self) -> None:
        if self._is_fully_read and not self._pending:
            self._responses.put_nowait(None)

    def _respond(self, step_id: int, step: Step, future: StepFuture) -> None:
        self._pending.discard(future)
        try:
            if not future.cancelled():
                self._send_result(step_id, step, future)
        except Exception as error:  # raised again by `responses`: a step without a response ends the stream
            self._responses.put_nowait(error)
        self._end_if_done()

    def _send_result(self, step_id: int, step: Step, future: StepFuture) -> None:
        error = future.exception()
        if error is not None:
            logger.error("step failed", exc_info=error, extra={"step_id": step_id})
            count_failed_step()
            if self._is_open:
                self._responses.put_nowait(
                    error if isinstance(error, DeviceLost) else StepFailed(f"step {step_id} failed")
                )
            return
        timed = future.result()
        if self._is_open:
            self._responses.put_nowait(self._response(step_id, timed))
        self._spans.end_step(step, timed.value)
        self._loop.call_soon(count_step, timed)  # after the response is sent

    def _response(self, step_id: int, timed: Timed[StepOutcome]) -> pb.StepResponse:
        result = outcome_to_proto(timed.value)
        for failed in result.failures:
            sequence_id = result.sequence_ids[failed.schedule_index]
            logger.warning(
                "sequence failed", extra={"step_id": step_id, "sequence_id": sequence_id, "why": failed.message}
            )
        for value in result.values:
            self._sequence_ids.discard(result.sequence_ids[value.schedule_index])
        for swap_result in timed.value.swap_results:
            if swap_result.failure is not None:
                logger.warning(
                    "swap failed",
                    extra={
                        "step_id": swap_result.step_id,
                        "direction": swap_result.direction.value,
                        "blocks": swap_result.num_blocks,
                        "why": swap_result.failure,
                    },
                )
        result.busy_us = max(0, round((timed.busy_seconds - timed.value.stall_seconds) * 1e6))
        if (pressure := self._take_pressure()) is not None:
            result.memory_pressure = pressure_to_proto(pressure)
        result.idle_us = round(timed.idle_seconds * 1e6)
        return pb.StepResponse(epoch=self.epoch, generation=self.generation, step_id=step_id, result=result)
