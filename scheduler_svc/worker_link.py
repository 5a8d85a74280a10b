"""Keeps one worker at work: dials it, opens a step stream, sends plans and commits their results, dials again."""

import asyncio
import logging
import socket
from collections import deque
from itertools import count

import grpc

from quire.worker.v1 import worker_pb2 as worker_v1
from quire.worker.v1.worker_pb2_grpc import WorkerServiceStub
from scheduler_svc.core.replica import Replica
from scheduler_svc.engine import Engine
from scheduler_svc.wire import outcome_from_proto, plan_to_proto, shape_from_proto
from svc_common.addresses import join_host_port
from svc_common.channels import inner_channel

log = logging.getLogger("quire.scheduler")

_REDIAL = 0.25  # seconds; a worker that restarts is found within this of being ready
_RESOLVE = 3.0  # seconds between look-ups of the workers' names
_DESCRIBE_TIMEOUT = 5.0
_STEP_TIMEOUT = 120.0
_generations = count(1)

StepCall = grpc.aio.StreamStreamCall[worker_v1.StepRequest, worker_v1.StepResponse]


class LinkBroken(Exception):  # noqa: N818
    """The stream to a worker cannot go on; its text is for the operator."""


class WorkerLink:
    """The step stream to the worker at `address`. A stream that breaks takes its replica with it, nothing else."""

    def __init__(self, engine: Engine, address: str) -> None:
        self._engine = engine
        self._address = address
        self._wake = asyncio.Event()
        self._responses: deque[worker_v1.StepResponse] = deque()
        self._was_ready = False

    async def run(self) -> None:
        """Serve the worker until cancelled."""
        last = ""
        while True:
            try:
                await self._serve()
            except (grpc.aio.AioRpcError, LinkBroken) as error:
                text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                if text != last:  # told once, not at each attempt; and one that never was there yet may be starting
                    level = logging.WARNING if self._was_ready else logging.INFO
                    log.log(level, "no worker", extra={"worker": self._address, "why": text})
                last = text or ""
            except Exception:
                # A fault of ours costs this replica its blocks, not the other workers or the process.
                log.exception("step stream failed", extra={"worker": self._address})
            await asyncio.sleep(_REDIAL)

    async def _serve(self) -> None:
        async with inner_channel(self._address) as channel:
            stub = WorkerServiceStub(channel)
            about = await stub.Describe(worker_v1.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT)
            if about.epoch > self._engine.epoch:
                # The worker has served a later term than ours, and would refuse our steps.
                self._engine.epoch = about.epoch + 1
            generation = next(_generations)
            call: StepCall = stub.Step()
            opening = worker_v1.StepRequest(epoch=self._engine.epoch, generation=generation)
            await call.write(opening)
            answer = await call.read()
            if not isinstance(answer, worker_v1.StepResponse) or not answer.HasField("ready"):
                raise LinkBroken(f"worker did not answer ready: {await call.details()}")
            self._check_same_model(about)  # nothing is awaited between this and add_worker
            replica = Replica(shape_from_proto(about), self._address)
            self._responses.clear()
            self._engine.add_worker(replica, about, self._wake)
            self._was_ready = True
            log.info("worker ready", extra={"worker": self._address, "blocks": about.num_blocks})
            try:
                await self._drive(call, replica, opening)
            finally:
                self._engine.remove_worker(replica)
                call.cancel()

    async def _drive(self, call: StepCall, replica: Replica, opening: worker_v1.StepRequest) -> None:
        """Plan, send, commit: the next step is sent while the worker runs the last one."""
        reader = asyncio.create_task(self._read(call))
        try:
            while True:
                while (plan := self._engine.schedule(replica)) is not None:
                    await call.write(plan_to_proto(plan, opening.epoch, opening.generation))
                await self._wait(replica)
                while self._responses:
                    self._commit(replica, self._responses.popleft(), opening)
                if reader.done():
                    raise LinkBroken(f"step stream ended: {await call.details()}")
        finally:
            reader.cancel()

    async def _wait(self, replica: Replica) -> None:
        """Wait for a response or for work; raises LinkBroken where a step takes too long, as on a device that hangs."""
        try:
            async with asyncio.timeout(_STEP_TIMEOUT if replica.in_flight else None):
                await self._wake.wait()
        except TimeoutError:
            raise LinkBroken(f"no answer to a step in {_STEP_TIMEOUT:.0f} s") from None
        self._wake.clear()

    async def _read(self, call: StepCall) -> None:
        try:
            while isinstance(response := await call.read(), worker_v1.StepResponse):
                self._responses.append(response)
                self._wake.set()
        except grpc.aio.AioRpcError:
            pass  # the call's status tells it to _drive
        finally:
            self._wake.set()

    def _commit(self, replica: Replica, response: worker_v1.StepResponse, opening: worker_v1.StepRequest) -> None:
        expected = replica.in_flight[0] if replica.in_flight else None
        place = (response.epoch, response.generation, response.step_id)
        if expected is None or place != (opening.epoch, opening.generation, expected.step_id):
            raise LinkBroken(f"worker answered step {place}, which is not the one in flight")
        if list(response.result.sequence_ids) != [part.sequence.id for part in expected.scheduled]:
            raise LinkBroken(f"worker answered step {response.step_id} for other sequences than it was sent")
        for failure in response.result.failures:
            log.error("sequence failed", extra={"worker": self._address, "why": failure.message})
        for transfer in response.result.transfers:
            if transfer.HasField("failure"):
                log.error("swap failed", extra={"worker": self._address, "why": transfer.failure})
        try:
            self._engine.commit(replica, outcome_from_proto(response.result))
        except ValueError as error:
            raise LinkBroken(f"worker's answer to step {response.step_id} is malformed: {error}") from None

    def _check_same_model(self, about: worker_v1.DescribeResponse) -> None:
        replicas = self._engine.core.replicas
        holds = min(about.context_length, about.num_blocks * about.block_size)
        if replicas and holds < self._engine.core.context_length:
            text = f"{holds} tokens of a sequence, and {self._engine.core.context_length} are promised"
            raise LinkBroken(f"worker is too small: it holds {text}")
        for replica in replicas:
            ours, theirs = replica.shape, shape_from_proto(about)
            if ours.fingerprint != theirs.fingerprint:
                pair = f"{theirs.fingerprint.hex()[:16]} beside {ours.fingerprint.hex()[:16]}"
                raise LinkBroken(f"worker serves another model: fingerprint {pair}")
            if ours.block_size != theirs.block_size:
                raise LinkBroken(f"worker has another block size: {theirs.block_size} beside {ours.block_size}")


class WorkerPool:
    """A link to each worker behind the configured names, which are looked up again every few seconds."""

    def __init__(self, engine: Engine, addresses: list[str]) -> None:
        self._engine = engine
        self._addresses = addresses
        self._links: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Keep the links until cancelled."""
        try:
            while True:
                found = await self._resolve()
                for address in found - self._links.keys():
                    self._links[address] = asyncio.create_task(WorkerLink(self._engine, address).run())
                for address in self._links.keys() - found:
                    self._links.pop(address).cancel()
                await asyncio.sleep(_RESOLVE)
        finally:
            for link in self._links.values():
                link.cancel()
            await asyncio.gather(*self._links.values(), return_exceptions=True)

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
