"""The gRPC side of the worker: quire.worker.v1.WorkerService."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from quire.worker.v1 import worker_pb2 as pb
from quire.worker.v1 import worker_pb2_grpc
from svc_common.epochs import EPOCH_LIMIT, LatestTerm, is_in_window
from svc_common.epochs import epoch_clock as _clock
from svc_common.errors import QuireError, Reason
from svc_common.protocols import STEP_PROTOCOLS
from worker_svc.device_thread import DeviceThread
from worker_svc.errors import DeviceLost
from worker_svc.memory_monitor import MemoryMonitor, MemoryPressure
from worker_svc.profiles import ProfileRefused, Profiles
from worker_svc.step_stream import ProtocolViolation, StepFailed, StepStream
from worker_svc.wire import block_hash_report_to_proto, description_to_proto, has_work

if TYPE_CHECKING:
    from worker_svc.step_runner import StepInstance

_TAKEOVER_SECONDS = 10.0  # in which another scheduler takes over, while this worker drains

logger = logging.getLogger("quire.worker")

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Answers UNAVAILABLE until there is a replica. When `device_lost` or `restart_ordered` is set, the process must
    end.
    """

    def __init__(
        self, device: DeviceThread, profile_dir: Path | None = None, memory: MemoryMonitor | None = None
    ) -> None:
        """Without `profile_dir`, profiles are refused; without `memory`, it never counts as short."""
        self._device = device
        self._memory = memory
        self._profiles = Profiles(profile_dir, device)
        self._started_at = time.time()
        self.device_lost = asyncio.Event()
        self.restart_ordered = asyncio.Event()
        self._instance: StepInstance | None = None
        self._stream: StepStream | None = None
        self._term = LatestTerm()  # of the last stream
        self._is_draining = False
        self._is_abandoned = False  # the last stream broke with sequences, while this worker drained
        self._stream_changed = asyncio.Event()  # one was opened, or has ended

    def serve(self, instance: "StepInstance") -> None:
        """Serves this replica from now on."""
        self._instance = instance

    async def drain(self) -> None:
        """Reports in Describe that it drains, and waits until the scheduler has no sequence here.

        If the stream breaks before that, waits some seconds for the next one: the sequences may not be able to continue
        elsewhere.
        """
        self._is_draining = True
        with suppress(TimeoutError):
            while self._stream is not None or self._is_abandoned:
                self._stream_changed.clear()
                async with asyncio.timeout(_TAKEOVER_SECONDS if self._stream is None else None):
                    await self._stream_changed.wait()

    async def Describe(  # noqa: N802
        self, request: pb.DescribeRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.DescribeResponse:
        return description_to_proto(
            self._ready().description,
            epoch=self._term.last[0],
            is_draining=self._is_draining,
            started_at=self._started_at,
            pressure=MemoryPressure.NONE if self._memory is None else self._memory.pressure,
        )

    async def ReportBlockHashes(  # noqa: N802
        self, request: pb.ReportBlockHashesRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.ReportBlockHashesResponse:
        instance, stream = self._ready(), self._stream
        term = (request.epoch, request.generation)
        if stream is None or term != (stream.epoch, stream.generation):
            text = f"no stream of epoch {term[0]}, generation {term[1]} is open"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        # Runs after the reset at the stream's start, and so after all launches of earlier streams.
        return block_hash_report_to_proto(await self._device.run(instance.runner.block_hashes.report))

    async def StartProfile(  # noqa: N802
        self, request: pb.StartProfileRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.StartProfileResponse:
        self._ready()
        try:
            await self._profiles.start()
        except ProfileRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.StartProfileResponse()

    async def StopProfile(  # noqa: N802
        self, request: pb.StopProfileRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.StopProfileResponse:
        try:
            path = await self._profiles.stop()
        except ProfileRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.StopProfileResponse(path=str(path))

    async def Restart(  # noqa: N802
        self, request: pb.RestartRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.RestartResponse:
        self._ready()
        if (problem := self._why_not_restart(request)) is not None:
            logger.warning("refused the order to restart", extra={"epoch": request.epoch, "why": problem})
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        self.restart_ordered.set()
        return pb.RestartResponse()

    async def Step(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.StepRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[pb.StepResponse]:
        instance = self._ready()
        stream = None
        try:
            requests = aiter(request_iterator)
            opening = await anext(requests, None)
            if opening is None:
                return
            stream = self._open(opening, instance)
            async with aclosing(stream.responses(requests)) as responses:
                async for response in responses:
                    yield response
        except ProtocolViolation as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except DeviceLost as error:
            self.device_lost.set()
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        except StepFailed as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        finally:
            if stream is not None:
                stream.close()
            if stream is not None and self._stream is stream:
                self._stream = None
                self._is_abandoned = self._is_draining and stream.has_sequences
                self._stream_changed.set()

    def _ready(self) -> "StepInstance":
        if self._instance is None:
            raise QuireError(Reason.MODEL_NOT_READY, "the model is loading", retry_after=1.0)
        return self._instance

    def _open(self, opening: pb.StepRequest, instance: "StepInstance") -> StepStream:
        """The stream that this message opens. It replaces the stream before it."""
        if opening.step_id != 0 or has_work(opening):
            raise ProtocolViolation("the first message opens the stream: it is step 0, without work")
        if (opening.protocol or 1) not in STEP_PROTOCOLS:
            message = f"this worker accepts step protocols {STEP_PROTOCOLS}, not {opening.protocol}"
            raise QuireError(Reason.PROTOCOL_UNSUPPORTED, message, field="protocol")
        term = (opening.epoch, opening.generation)
        self._begin_term(term)
        if self._stream is not None:
            self._stream.supersede(opening.generation)
        take_pressure = (lambda: None) if self._memory is None else self._memory.take_pressure
        self._stream = StepStream(*term, instance.runner, self._device, take_pressure)
        self._stream_changed.set()
        return self._stream

    def _why_not_restart(self, order: pb.RestartRequest) -> str | None:
        """Why an order to restart is refused, by what this worker knows itself; None: it is not."""
        epoch, last_in_window = self._term.last[0], self._term.last_in_window[0]
        if not is_in_window(order.epoch, _clock()):
            return f"epoch {order.epoch} is more than a day ahead of this worker's clock, or not below 2^53"
        if order.worker_epoch != epoch:
            return f"this worker's epoch is {epoch}, not {order.worker_epoch}"
        if is_in_window(epoch, order.epoch):
            return f"this worker's epoch {epoch} is not more than a day ahead of epoch {order.epoch}"
        if order.epoch < last_in_window != epoch:
            return f"a leader of epoch {last_in_window} has followed that of epoch {order.epoch}"
        if self._stream is not None:
            return f"a step stream of epoch {self._stream.epoch} is open"
        return None

    def _begin_term(self, term: tuple[int, int]) -> None:
        """Raises ProtocolViolation where a later term has begun, by the rule of LatestTerm."""
        if term[0] >= EPOCH_LIMIT:
            raise ProtocolViolation(f"epoch {term[0]} is not below 2^53")
        clock = _clock()
        before = self._term.before(term[0], clock)
        if term <= before:
            raise ProtocolViolation(
                f"a stream of epoch {term[0]}, generation {term[1]} after one of epoch {before[0]}, "
                f"generation {before[1]}"
            )
        self._term.begin(term, clock)
