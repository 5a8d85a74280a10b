"""One gateway's session, as requests see it: the messages that wait to be sent to it."""

import asyncio

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1


class GatewaySession:
    """An unbounded queue of messages. A gateway never stops reading its stream, so the queue stays short."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.protocol = 1
        """The version that the gateway has chosen; one of version 1 does not say so."""
        self._outbox: asyncio.Queue[scheduler_v1.SessionResponse | None] = asyncio.Queue()

    def send(self, message: scheduler_v1.SessionResponse) -> None:
        """Sends a message. It belongs to the session from now on."""
        self.num_sent += 1
        self._outbox.put_nowait(message)

    def close(self) -> None:
        """Ends the stream after the messages so far."""
        self._outbox.put_nowait(None)

    async def next(self) -> scheduler_v1.SessionResponse | None:
        """The next message to write, or None at the end."""
        return await self._outbox.get()
