"""The session stream: one per gateway, commands up, one batch of events per step down."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceServicer
from scheduler_svc.engine import SchedulerEngine
from svc_common.errors import QuireError, Reason

log = logging.getLogger("quire.scheduler")

_HEARTBEAT = 0.25  # seconds; a session that was silent for one of them is sent an empty message in the next

Context = grpc.aio.ServicerContext[scheduler_v1.SessionRequest, scheduler_v1.SessionResponse]


class GatewaySession:
    """One gateway's end of the stream. A gateway never stops reading, so what waits here stays short."""

    def __init__(self, engine: SchedulerEngine) -> None:
        self._engine = engine
        self._outbox: asyncio.Queue[scheduler_v1.SessionResponse | None] = asyncio.Queue()
        self._was_silent = False

    def send(self, message: scheduler_v1.SessionResponse) -> None:
        """Send events."""
        message.epoch = self._engine.epoch
        self._put(message)

    def send_status(self, status: scheduler_v1.Status) -> None:
        """Send what is served."""
        self._put(scheduler_v1.SessionResponse(epoch=self._engine.epoch, status=status))

    async def send_heartbeat(self) -> None:
        """Let the gateway know that the scheduler is there, whenever it has heard nothing for a while."""
        while True:
            self._was_silent = True
            await asyncio.sleep(_HEARTBEAT)
            if self._was_silent:
                self._put(scheduler_v1.SessionResponse(epoch=self._engine.epoch))

    def close(self) -> None:
        """Say that nothing more is to be sent."""
        self._outbox.put_nowait(None)

    async def next(self) -> scheduler_v1.SessionResponse | None:
        """The next message to send, or None at the end."""
        return await self._outbox.get()

    def _put(self, response: scheduler_v1.SessionResponse) -> None:
        self._was_silent = False
        self._outbox.put_nowait(response)


class SchedulerServicer(SchedulerServiceServicer):
    """Sessions of all gateways with the one engine, while there is one: only the leader has it."""

    def __init__(self) -> None:
        self._engine: SchedulerEngine | None = None
        self._sessions: set[GatewaySession] = set()

    def lead(self, engine: SchedulerEngine) -> None:
        """Take sessions from now on."""
        self._engine = engine

    def resign(self) -> None:
        """End all sessions, and take none any more."""
        self._engine = None
        for session in self._sessions:
            session.close()

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[scheduler_v1.SessionRequest], context: Context
    ) -> AsyncIterator[scheduler_v1.SessionResponse]:
        """Serve one gateway until either side leaves. Raises QuireError where this scheduler does not lead."""
        engine = self._engine
        if engine is None:
            raise _not_leader()
        session = GatewaySession(engine)
        self._sessions.add(session)
        engine.join(session)
        commands = asyncio.create_task(_take_commands(engine, session, requests))
        commands.add_done_callback(lambda _: session.close())
        heart = asyncio.create_task(session.send_heartbeat())
        log.info("gateway joined", extra={"gateway": context.peer()})
        try:
            while (message := await session.next()) is not None:
                yield message
            if self._engine is None:
                raise _not_leader()
            commands.result()
        finally:
            heart.cancel()
            commands.cancel()
            self._sessions.discard(session)
            engine.leave(session)
            log.info("gateway left", extra={"gateway": context.peer()})


async def _take_commands(
    engine: SchedulerEngine, session: GatewaySession, requests: AsyncIterator[scheduler_v1.SessionRequest]
) -> None:
    async for request in requests:
        engine.take(request, session)


def _not_leader() -> QuireError:
    return QuireError(Reason.NOT_LEADER, "this scheduler does not lead")
