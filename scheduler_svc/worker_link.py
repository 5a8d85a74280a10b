"""The link to one worker: dials it, opens a step stream, watches its health, and dials it again."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from itertools import count

import grpc

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.kv.block_hash_report import BlockHashReport
from scheduler_svc.core.replica import Replica
from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.metrics import RESPONSES_REFUSED
from scheduler_svc.step_loop import LinkBroken, PlanningFailed, StepLoop
from scheduler_svc.step_responses import InvalidResponse
from scheduler_svc.step_wire import hash_report_from_proto, pressure_from_proto, shape_from_proto
from scheduler_svc.store.base import EpochOutsideWindow
from scheduler_svc.worker_client import StepCall, WorkerClient
from svc_common.channels import end_if_cancelled, is_credential_error
from svc_common.identity import Outbound
from svc_common.protocols import STEP_PROTOCOLS, ProtocolRange

log = logging.getLogger("quire.scheduler")

_REDIAL = 0.25  # seconds between dials: a worker that restarts is used within this of being ready
_REDIAL_SET_APART = 5.0  # seconds between dials of a worker that must be restarted
_MAX_DOUBLINGS = 7  # of _REDIAL, after exceptions of this scheduler's own
_WATCH = 1.0  # seconds between health checks of a worker
_ANSWER_TIMEOUT = 5.0  # seconds in which a worker answers if its process runs
_READY_TIMEOUT = 120.0  # seconds in which a worker is ready for the first step of a stream
_generations = count(1)


class WorkerSetApart(LinkBroken):
    """The worker is not used until it is restarted."""


class WorkerLink:
    """The step stream to the worker at `address`. When it breaks, its replica is removed, and nothing else."""

    def __init__(
        self, engine: SchedulerEngine, address: str, on_change: Callable[[], None], outbound: Outbound
    ) -> None:
        """`on_change` is called when `is_connected` has changed."""
        self.is_connected = False
        """Whether the worker accepts steps."""
        self._engine = engine
        self._address = address
        self._on_change = on_change
        self._outbound = outbound
        self._was_ready = False
        self._last = ""  # why there was no worker, last time
        self._is_leaving = False
        self._num_failures = 0  # exceptions of this scheduler's own since the last step of the worker
        self._restart_ordered_by = 0  # the epoch of the last order that the worker has accepted

    def leave(self) -> None:
        """Stops using the worker, once its sequences have ended or moved."""
        self._is_leaving = True

    def stay(self) -> None:
        """Uses the worker on, also where it was to be left."""
        self._is_leaving = False

    async def run(self) -> None:
        """Uses the worker until it has left, or until cancelled."""
        try:
            while not self._is_leaving:
                seconds = await self._try_to_serve()
                await asyncio.sleep(seconds)
        finally:
            self._engine.mark_set_apart(self._address, None)

    async def _try_to_serve(self) -> float:
        """Uses the worker until its stream breaks. Returns the seconds until it is dialled again."""
        why_apart = None
        try:
            await self._serve()
        except (grpc.aio.AioRpcError, LinkBroken, InvalidResponse) as error:
            text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            # Logged once, not at each attempt. A worker that was never ready may be starting.
            if text != self._last:
                is_refusal = is_credential_error(error, has_credential=self._outbound.has_credential)
                is_noteworthy = self._was_ready or isinstance(error, WorkerSetApart) or is_refusal
                level = logging.WARNING if is_noteworthy else logging.INFO
                log.log(level, "no worker", extra={"worker": self._address, "why": text})
            self._last = text or ""
            if isinstance(error, WorkerSetApart):
                why_apart = text
            if isinstance(error, InvalidResponse):
                RESPONSES_REFUSED.labels(error.part.value).inc()
        except Exception as error:
            # A bug here costs this replica its blocks; the other workers are used as long as they can be.
            log.exception("step stream failed", extra={"worker": self._address})
            self._num_failures += 1
            self._engine.on_stream_failed(error.__cause__ if isinstance(error.__cause__, Exception) else error)
        end_if_cancelled()
        self._engine.mark_set_apart(self._address, why_apart)
        if why_apart is not None:
            return _REDIAL_SET_APART
        return _REDIAL * 2.0 ** min(self._num_failures, _MAX_DOUBLINGS)

    async def _serve(self) -> None:
        """Uses the worker until it has left. Raises LinkBroken, AioRpcError and InvalidResponse."""
        async with self._outbound.channel(self._address) as channel:
            worker = WorkerClient(channel, self._outbound.metadata)
            description = await worker.describe(_ANSWER_TIMEOUT)
            if description.is_draining and not self._engine.is_awaited(description):
                raise LinkBroken("worker is draining")
            is_in_window = await self._raise_epoch(description.epoch)
            opening = worker_v1.StepRequest(
                epoch=self._engine.epoch, generation=next(_generations), protocol=_protocol_for(description)
            )
            call = worker.step()
            try:
                try:
                    hash_report = await self._open(worker, call, opening)
                except grpc.aio.AioRpcError as error:
                    if is_in_window or error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                        raise
                    raise WorkerSetApart(await self._order_restart(worker, description.epoch)) from error
                self._engine.mark_set_apart(self._address, None)
                self._check_fits(description)  # nothing is awaited between this and add_worker
                replica = Replica(shape_from_proto(description), self._address)
                steps = StepLoop(self._engine, replica, call, opening, description.vocab_size)
                self._engine.add_worker(replica, description, steps.wake, hash_report)
                self._was_ready, self._last = True, ""
                about = {"worker": self._address, "model": description.model, "blocks": description.num_blocks}
                log.info("worker ready", extra=about)
                await self._run_steps(worker, steps)
            finally:
                call.cancel()

    async def _raise_epoch(self, epoch: int) -> bool:
        """Begins a term above one that the worker has seen. False where no leader can have begun that: the worker may
        accept this term, nevertheless. Raises LinkBroken.
        """
        if epoch <= self._engine.epoch:
            return True
        try:
            await self._engine.on_higher_epoch(epoch)
        except EpochOutsideWindow:
            return False
        if epoch > self._engine.epoch:
            raise LinkBroken(f"worker has served epoch {epoch}, later than {self._engine.epoch}")
        return True

    async def _order_restart(self, worker: WorkerClient, worker_epoch: int) -> str:
        """Orders a worker to restart whose epoch no leader can have begun, once per term. Returns why it is set apart.

        Redis has just confirmed that this scheduler leads, and that the epoch is outside the window.
        """
        why = (
            f"worker has seen epoch {worker_epoch}, which no scheduler can have begun: it is more than a day ahead of "
            "the clocks"
        )
        epoch = self._engine.epoch
        if self._restart_ordered_by == epoch:
            return f"{why}; it was ordered to restart in this term before; restart the worker"
        try:
            await worker.restart(epoch, worker_epoch, _ANSWER_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            return f"{why}; it does not restart ({error.details()}); restart the worker"
        self._restart_ordered_by = epoch
        return f"{why}; it restarts"

    async def _open(self, worker: WorkerClient, call: StepCall, opening: worker_v1.StepRequest) -> BlockHashReport:
        """Opens the stream; returns the hashes of the worker's blocks from earlier streams."""
        try:
            async with asyncio.timeout(_READY_TIMEOUT):
                await call.write(opening)
                answer = await call.read()
        except TimeoutError:
            raise LinkBroken(f"worker was not ready in {_READY_TIMEOUT:.0f} s") from None
        if not isinstance(answer, worker_v1.StepResponse) or not answer.HasField("ready"):
            raise LinkBroken(f"worker did not answer ready: {await call.details()}")
        hashes = await worker.block_hashes(opening.epoch, opening.generation, _ANSWER_TIMEOUT)
        try:
            return hash_report_from_proto(hashes)
        except ValueError as error:
            raise LinkBroken(f"worker's block-hash report is malformed: {error}") from None

    async def _run_steps(self, worker: WorkerClient, steps: StepLoop) -> None:
        """Runs the steps of a replica that was added, while its worker is healthy, and removes it."""
        self._set_connected(True)
        may_have_crashed = True
        try:
            await _until_first(steps.run(), self._watch(worker, steps))
        except PlanningFailed:
            may_have_crashed = False
            raise
        finally:
            if steps.has_committed:
                self._num_failures = 0
            self._engine.remove_worker(steps.replica, may_have_crashed=may_have_crashed)
            self._set_connected(False)

    async def _watch(self, worker: WorkerClient, steps: StepLoop) -> None:
        """Checks the worker's health. Raises LinkBroken when it does not answer, which a stream does not show, or when
        a step takes too long, as on a device that hangs.
        """
        is_silent = False
        while True:
            if not is_silent:
                await asyncio.sleep(_WATCH)
            steps.check_progress()
            try:
                description = await worker.describe(_ANSWER_TIMEOUT / 2)
            except grpc.aio.AioRpcError as error:
                # A scheduler that was itself suspended finds one answer overdue, but not the next.
                if is_silent or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise LinkBroken(f"worker does not answer: {error.details()}") from None
                is_silent = True
                continue
            is_silent = False
            self._apply_description(description, steps)

    def _apply_description(self, description: worker_v1.DescribeResponse, steps: StepLoop) -> None:
        """Applies what a worker in use says of its memory, and retires it when it drains."""
        replica = steps.replica
        pressure = pressure_from_proto(description.memory_pressure)
        if pressure is not None and (pressure is not replica.memory_pressure or replica.is_short_of_memory):
            replica.note_pressure(pressure)
            steps.wake.set()
        if (description.is_draining or self._is_leaving) and not replica.is_retired:
            log.info("worker drains", extra={"worker": self._address})
            self._engine.retire_worker(replica)
        if replica.is_retired:
            steps.wake.set()  # it may have left
            if not (description.is_draining or self._is_leaving or replica.is_last):
                raise LinkBroken("worker was to be left, and its address is known again")

    def _set_connected(self, is_connected: bool) -> None:
        self.is_connected = is_connected
        self._on_change()

    def _check_fits(self, description: worker_v1.DescribeResponse) -> None:
        """Rejects a worker whose limits differ from those of the same model's workers. Raises LinkBroken."""
        model = self._engine.models.find(description.model, description.fingerprint)
        if model is None or not model.core.replicas:
            return
        holds = shape_from_proto(description).max_length
        if holds < model.core.context_length:
            text = f"{holds} tokens of a sequence, and {model.core.context_length} are promised"
            raise LinkBroken(f"worker is too small: it holds {text}")
        block_size = model.core.replicas[0].shape.block_size
        if description.block_size != block_size:
            raise LinkBroken(
                f"worker has block size {description.block_size}, and the others of its model have {block_size}"
            )


def _protocol_for(description: worker_v1.DescribeResponse) -> int:
    """The protocol of a stream to a worker. Raises LinkBroken where there is none that both accept."""
    protocol = STEP_PROTOCOLS.newest_common(description.oldest_protocol, description.newest_protocol)
    if protocol is None:
        theirs = ProtocolRange(description.oldest_protocol, description.newest_protocol)
        raise LinkBroken(f"worker accepts step protocols {theirs}, and this scheduler {STEP_PROTOCOLS}")
    return protocol


async def _until_first(*works: Coroutine[None, None, None]) -> None:
    """Runs all of these until one ends, and cancels the others. Raises what that one raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
