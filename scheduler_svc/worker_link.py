"""Keeps one worker at work: dials it, opens a step stream, sends plans and commits their results, dials again."""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Coroutine
from itertools import count
from typing import TYPE_CHECKING

import grpc

from quire.worker.v1 import worker_pb2 as worker_v1
from quire.worker.v1.worker_pb2_grpc import WorkerServiceStub
from scheduler_svc.core.block_hash_report import BlockHashReport
from scheduler_svc.core.replica import Replica
from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.metrics import RESPONSES_REFUSED
from scheduler_svc.responses import InvalidResponse, ResponseValidator
from scheduler_svc.wire import hash_report_from_proto, plan_to_proto, shape_from_proto
from svc_common.addresses import join_host_port
from svc_common.channels import end_if_cancelled, internal_channel

if TYPE_CHECKING:
    from quire.worker.v1.worker_pb2_grpc import WorkerServiceAsyncStub

log = logging.getLogger("quire.scheduler")

_REDIAL = 0.25  # seconds; a worker that restarts is found within this of being ready
_RESOLVE = 3.0  # seconds between look-ups of the workers' names
_WATCH = 1.0  # seconds between looks at a worker that is at work
_ANSWER_TIMEOUT = 5.0  # in which a worker answers if its process runs
_STEP_TIMEOUT = 120.0
_generations = count(1)

StepCall = grpc.aio.StreamStreamCall[worker_v1.StepRequest, worker_v1.StepResponse]


class LinkBroken(Exception):  # noqa: N818
    """The stream to a worker cannot go on; its text is for the operator."""


class WorkerLink:
    """The step stream to the worker at `address`. A stream that breaks takes its replica with it, nothing else."""

    def __init__(self, engine: SchedulerEngine, address: str) -> None:
        self._engine = engine
        self._address = address
        self._wake = asyncio.Event()
        self._responses: deque[worker_v1.StepResponse] = deque()
        self._progressed_at = 0.0  # when a step was answered last, or the first of those in flight was planned
        self._was_ready = False
        self._last = ""  # why there was no worker, last time
        self._is_leaving = False

    def leave(self) -> None:
        """The worker is to be used no more, once what runs there is over or elsewhere."""
        self._is_leaving = True

    async def run(self) -> None:
        """Serve the worker until it has left, or until cancelled."""
        while not self._is_leaving:
            try:
                await self._serve()
            except (grpc.aio.AioRpcError, LinkBroken, InvalidResponse) as error:
                text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                # Told once, not at each attempt; and one that never was there yet may be starting.
                if text != self._last:
                    level = logging.WARNING if self._was_ready else logging.INFO
                    log.log(level, "no worker", extra={"worker": self._address, "why": text})
                self._last = text or ""
                if isinstance(error, InvalidResponse):
                    RESPONSES_REFUSED.labels(error.part.value).inc()
            except Exception:
                # A fault of ours costs this replica its blocks, not the other workers or the process.
                log.exception("step stream failed", extra={"worker": self._address})
            end_if_cancelled()
            await asyncio.sleep(_REDIAL)

    async def _serve(self) -> None:
        async with internal_channel(self._address) as channel:
            stub = WorkerServiceStub(channel)
            description = await stub.Describe(worker_v1.DescribeRequest(), timeout=_ANSWER_TIMEOUT)
            if description.is_draining:
                raise LinkBroken("worker is about to end")
            if description.epoch > self._engine.epoch:
                await self._engine.on_higher_epoch(description.epoch)
            if description.epoch > self._engine.epoch:
                raise LinkBroken(f"worker has served epoch {description.epoch}, later than {self._engine.epoch}")
            opening = worker_v1.StepRequest(epoch=self._engine.epoch, generation=next(_generations))
            call: StepCall = stub.Step()
            try:
                hash_report = await self._open(stub, call, opening)
                self._check_same_model(description)  # nothing is awaited between this and add_worker
                replica = Replica(shape_from_proto(description), self._address)
                self._responses.clear()
                self._engine.add_worker(replica, description, self._wake, hash_report)
                self._was_ready, self._last = True, ""
                log.info("worker ready", extra={"worker": self._address, "blocks": description.num_blocks})
                try:
                    drive = self._drive(
                        call,
                        replica,
                        opening,
                        ResponseValidator(opening, description.vocab_size, replica.shape.max_new_tokens),
                    )
                    await _until_first(drive, self._watch(stub, replica))
                finally:
                    self._engine.remove_worker(replica)
            finally:
                call.cancel()

    async def _open(
        self, stub: "WorkerServiceAsyncStub", call: StepCall, opening: worker_v1.StepRequest
    ) -> BlockHashReport:
        """Open the stream; returns what the worker's blocks hold from streams before."""
        try:
            async with asyncio.timeout(_STEP_TIMEOUT):
                await call.write(opening)
                answer = await call.read()
        except TimeoutError:
            raise LinkBroken(f"worker was not ready in {_STEP_TIMEOUT:.0f} s") from None
        if not isinstance(answer, worker_v1.StepResponse) or not answer.HasField("ready"):
            raise LinkBroken(f"worker did not answer ready: {await call.details()}")
        request = worker_v1.ReportBlockHashesRequest(epoch=opening.epoch, generation=opening.generation)
        held = await stub.ReportBlockHashes(request, timeout=_ANSWER_TIMEOUT)
        try:
            return hash_report_from_proto(held)
        except ValueError as error:
            raise LinkBroken(f"worker's block-hash report is malformed: {error}") from None

    async def _drive(
        self, call: StepCall, replica: Replica, opening: worker_v1.StepRequest, validator: ResponseValidator
    ) -> None:
        """Plan, send, commit: the next step is sent while the worker runs the last one. Until it is done with."""
        reader = asyncio.create_task(self._read(call))
        try:
            while not (replica.is_retired and replica.is_idle):
                while (plan := self._engine.schedule(replica)) is not None:
                    if len(replica.in_flight) == 1:
                        self._progressed_at = time.monotonic()
                    await call.write(plan_to_proto(plan, opening.epoch, opening.generation))
                    validator.expect(plan)
                await self._wake.wait()
                self._wake.clear()
                while self._responses:
                    self._commit(replica, validator, self._responses.popleft())
                    self._progressed_at = time.monotonic()
                if reader.done():
                    raise LinkBroken(f"step stream ended: {await call.details()}")
        except asyncio.InvalidStateError:  # what grpc raises of a write to a call that is over
            raise LinkBroken(f"step stream ended: {await call.details()}") from None
        finally:
            reader.cancel()

    async def _read(self, call: StepCall) -> None:
        try:
            while isinstance(response := await call.read(), worker_v1.StepResponse):
                self._responses.append(response)
                self._wake.set()
        except grpc.aio.AioRpcError:
            pass  # the call's status tells it to _drive
        finally:
            self._wake.set()

    async def _watch(self, stub: "WorkerServiceAsyncStub", replica: Replica) -> None:
        """Notice that the worker is to end, and raise LinkBroken where it stopped: a stream tells of neither.

        So it does where a step takes too long, as on a device that hangs.
        """
        is_silent = False
        while True:
            if not is_silent:
                await asyncio.sleep(_WATCH)
            if replica.in_flight and time.monotonic() > self._progressed_at + _STEP_TIMEOUT:
                raise LinkBroken(f"no answer to a step in {_STEP_TIMEOUT:.0f} s")
            try:
                description = await stub.Describe(worker_v1.DescribeRequest(), timeout=_ANSWER_TIMEOUT / 2)
            except grpc.aio.AioRpcError as error:
                # A scheduler that was held up itself finds one answer overdue, but not the next.
                if is_silent or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise LinkBroken(f"worker does not answer: {error.details()}") from None
                is_silent = True
                continue
            is_silent = False
            if (description.is_draining or self._is_leaving) and not replica.is_retired:
                log.info("worker is about to end", extra={"worker": self._address})
                self._engine.retire_worker(replica)
                self._wake.set()

    def _commit(self, replica: Replica, validator: ResponseValidator, response: worker_v1.StepResponse) -> None:
        outcome = validator.outcome_of(response, replica)
        for failure in response.result.failures:
            log.error("sequence failed", extra={"worker": self._address, "why": failure.message})
        for swap in response.result.swaps:
            if swap.HasField("failure"):
                log.error("swap failed", extra={"worker": self._address, "why": swap.failure})
        self._engine.commit(replica, outcome)

    def _check_same_model(self, description: worker_v1.DescribeResponse) -> None:
        replicas = self._engine.core.replicas
        holds = min(description.context_length, description.num_blocks * description.block_size)
        if replicas and holds < self._engine.core.context_length:
            text = f"{holds} tokens of a sequence, and {self._engine.core.context_length} are promised"
            raise LinkBroken(f"worker is too small: it holds {text}")
        for replica in replicas:
            ours, theirs = replica.shape, shape_from_proto(description)
            if ours.fingerprint != theirs.fingerprint:
                pair = f"{theirs.fingerprint.hex()[:16]} beside {ours.fingerprint.hex()[:16]}"
                raise LinkBroken(f"worker serves another model: fingerprint {pair}")
            if ours.block_size != theirs.block_size:
                raise LinkBroken(f"worker has another block size: {theirs.block_size} beside {ours.block_size}")


async def _until_first(*works: Coroutine[None, None, None]) -> None:
    """Do all of these until one is over, which ends the others. Raises what that one raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


class WorkerPool:
    """A link to each worker behind the configured names, which are looked up again every few seconds."""

    def __init__(self, engine: SchedulerEngine, addresses: list[str]) -> None:
        self._engine = engine
        self._addresses = addresses
        self._links: dict[str, tuple[WorkerLink, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Keep the links until cancelled."""
        try:
            while True:
                found = await self._resolve()
                self._links = {where: (link, task) for where, (link, task) in self._links.items() if not task.done()}
                for address in found - self._links.keys():
                    link = WorkerLink(self._engine, address)
                    self._links[address] = (link, asyncio.create_task(link.run()))
                for address in self._links.keys() - found:
                    self._links[address][0].leave()
                await asyncio.sleep(_RESOLVE)
        finally:
            tasks = [task for _, task in self._links.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _resolve(self) -> set[str]:
        loop = asyncio.get_running_loop()
        found: set[str] = set()
        for address in self._addresses:
            host, _, port = address.rpartition(":")
            try:
                infos = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            except OSError as error:
                # A name without an answer says nothing about workers that are at work: keep those.
                log.warning("cannot look up workers", extra={"name": host, "why": str(error)})
                return found | self._links.keys()
            for *_, where in infos:
                found.add(join_host_port(str(where[0]), int(where[1])))
        return found
