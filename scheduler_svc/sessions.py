"""The session stream, one for each gateway: receives its commands, and sends one message of events for each step."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceServicer
from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.gateway_session import GatewaySession
from svc_common.errors import QuireError, Reason
from svc_common.protocols import SESSION_PROTOCOLS

log = logging.getLogger("quire.scheduler")

_HEARTBEAT = 0.25  # seconds without a message after which a session is sent an empty one

Context = grpc.aio.ServicerContext[scheduler_v1.SessionRequest, scheduler_v1.SessionResponse]


class SchedulerServicer(SchedulerServiceServicer):
    """The sessions of all gateways. Only the leader has an engine, and accepts sessions."""

    def __init__(self) -> None:
        self._engine: SchedulerEngine | None = None
        self._sessions: set[GatewaySession] = set()

    def lead(self, engine: SchedulerEngine) -> None:
        """Accepts sessions from now on."""
        self._engine = engine

    def resign(self) -> None:
        """Ends all sessions, and accepts no more until it leads again."""
        self._engine = None
        for session in self._sessions:
            session.close()

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[scheduler_v1.SessionRequest], context: Context
    ) -> AsyncIterator[scheduler_v1.SessionResponse]:
        """Serves one gateway until either side ends the stream. Raises QuireError if this scheduler does not lead."""
        engine = self._engine
        if engine is None:
            raise _not_leader()
        session = GatewaySession()
        self._sessions.add(session)
        engine.join(session)
        commands = asyncio.create_task(_take_commands(engine, session, requests))
        commands.add_done_callback(lambda _: session.close())
        heart = asyncio.create_task(_send_heartbeats(engine, session))
        log.info("gateway joined", extra={"gateway": context.peer()})
        try:
            while (message := await session.next()) is not None:
                yield message
            if self._engine is not engine:
                raise _not_leader()
            commands.result()
        finally:
            heart.cancel()
            commands.cancel()
            self._sessions.discard(session)
            engine.leave(session)
            log.info("gateway left", extra={"gateway": context.peer()})


async def _send_heartbeats(engine: SchedulerEngine, session: GatewaySession) -> None:
    while True:
        num_sent = session.num_sent
        await asyncio.sleep(_HEARTBEAT)
        if session.num_sent == num_sent:
            session.send(scheduler_v1.SessionResponse(epoch=engine.epoch))


async def _take_commands(
    engine: SchedulerEngine, session: GatewaySession, requests: AsyncIterator[scheduler_v1.SessionRequest]
) -> None:
    async for request in requests:
        if request.HasField("hello"):
            _check_protocol(request.hello.protocol)
            session.protocol = request.hello.protocol
        elif request.HasField("batch"):
            for command in request.batch.commands:
                engine.take(command, session)
        else:
            engine.take(request, session)


def _check_protocol(protocol: int) -> None:
    """Refuses a session of a protocol that this scheduler does not accept."""
    if protocol not in SESSION_PROTOCOLS:
        message = f"this scheduler accepts session protocols {SESSION_PROTOCOLS}, not {protocol}"
        raise QuireError(Reason.PROTOCOL_UNSUPPORTED, message, field="hello.protocol")


def _not_leader() -> QuireError:
    return QuireError(Reason.NOT_LEADER, "this scheduler does not lead")
