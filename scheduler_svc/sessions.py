"""The session stream: one per gateway, commands up, one batch of events per step down."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceServicer
from scheduler_svc.core.plan import Failure
from scheduler_svc.engine import Engine
from scheduler_svc.records import Records
from scheduler_svc.wire import failed_to_proto

log = logging.getLogger("quire.scheduler")

Context = grpc.aio.ServicerContext[scheduler_v1.SessionRequest, scheduler_v1.SessionResponse]


class GatewaySession:
    """One gateway's end of the stream. A gateway never stops reading, so what waits here stays short."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outbox: asyncio.Queue[scheduler_v1.SessionResponse | None] = asyncio.Queue()

    def tell(self, events: list[scheduler_v1.Event]) -> None:
        """Send events."""
        self._outbox.put_nowait(scheduler_v1.SessionResponse(epoch=self._engine.epoch, events=events))

    def tell_status(self, status: scheduler_v1.Status) -> None:
        """Send what is served."""
        self._outbox.put_nowait(scheduler_v1.SessionResponse(epoch=self._engine.epoch, status=status))

    def close(self) -> None:
        """Say that nothing more is to be sent."""
        self._outbox.put_nowait(None)

    async def next(self) -> scheduler_v1.SessionResponse | None:
        """The next message to send, or None at the end."""
        return await self._outbox.get()


class SchedulerServicer(SchedulerServiceServicer):
    """Sessions of all gateways with the one engine."""

    def __init__(self, engine: Engine, records: Records) -> None:
        self._engine = engine
        self._records = records

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[scheduler_v1.SessionRequest], context: Context
    ) -> AsyncIterator[scheduler_v1.SessionResponse]:
        """Serve one gateway until either side leaves."""
        session = GatewaySession(self._engine)
        self._engine.join(session)
        commands = asyncio.create_task(self._take_commands(session, requests))
        commands.add_done_callback(lambda _: session.close())
        log.info("gateway joined", extra={"gateway": context.peer()})
        try:
            while (message := await session.next()) is not None:
                yield message
            commands.result()
        finally:
            commands.cancel()
            self._engine.leave(session)
            log.info("gateway left", extra={"gateway": context.peer()})

    async def _take_commands(
        self, session: GatewaySession, requests: AsyncIterator[scheduler_v1.SessionRequest]
    ) -> None:
        async for request in requests:
            match request.WhichOneof("command"):
                case "submit":
                    await self._submit(session, request.submit)
                case "cancel":
                    self._engine.cancel(request.cancel.key)
                case "detach":
                    self._engine.detach(request.detach.key)
                case "finish":
                    finish = request.finish
                    self._engine.finish(finish.key, finish.index, finish.num_tokens)
                case "acknowledge":
                    acknowledge = request.acknowledge
                    self._engine.acknowledge(acknowledge.key, acknowledge.index, acknowledge.num_tokens)

    async def _submit(self, session: GatewaySession, submit: scheduler_v1.Submit) -> None:
        # A live key is the engine's to judge; otherwise the record is written before the request is queued.
        if self._engine.is_live(submit.key) or await self._records.accept(submit):
            self._engine.submit(submit, session)
        else:
            session.tell([failed_to_proto(submit.key, Failure.KEY_IN_USE, "a request with this id has finished")])
