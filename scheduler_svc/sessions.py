"""The session stream: one per gateway, commands up, one batch of events per step down."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceServicer
from scheduler_svc.engine import Engine
from scheduler_svc.records import Records

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
        self._acceptances: set[asyncio.Task[None]] = set()

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
                    if self._engine.reserve(request.submit, session):
                        # A slow store holds up this request, not the commands behind it; nor does the end of the
                        # session end it, since the gateway may be back by then.
                        task = asyncio.create_task(self._accept(request.submit, session))
                        self._acceptances.add(task)
                        task.add_done_callback(self._acceptances.discard)
                case "cancel":
                    cancel = request.cancel
                    submission_id = cancel.submission_id if cancel.HasField("submission_id") else None
                    self._engine.cancel(cancel.key, submission_id)
                case "detach":
                    self._engine.detach(request.detach.key, session)
                case "finish":
                    finish = request.finish
                    self._engine.finish(finish.key, finish.index, finish.num_tokens, session)
                case "acknowledge":
                    looked = request.acknowledge
                    self._engine.acknowledge(looked.key, looked.index, looked.num_tokens, session)

    async def _accept(self, submit: scheduler_v1.Submit, session: GatewaySession) -> None:
        """Write the record, then queue the request."""
        try:
            recorded = await self._records.accept(submit)
        except Exception:
            log.exception("a record could not be written")
            recorded = True  # the request runs on without one, as where the store is away
        try:
            self._engine.submit(submit, recorded=recorded)
        except Exception:
            log.exception("a request could not be taken")
            self._engine.refuse(submit, session)
