"""One gateway's session, as requests see it: the messages that wait to be sent to it."""

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from svc_common.message_queue import MessageQueue


class GatewaySession:
    """An unbounded queue of messages. A gateway never stops reading its stream, so the queue stays short."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.protocol = 1
        """The version that the gateway has chosen; one of version 1 does not say so."""
        self._outbox: MessageQueue[scheduler_v1.SessionResponse] = MessageQueue(_is_of_the_same_term)

    def send(self, message: scheduler_v1.SessionResponse, *, delay: float = 0.0) -> None:
        """Sends a message, which belongs to the session from now on: with the next one, or after `delay` seconds."""
        self.num_sent += 1
        self._outbox.put(message, delay=delay)

    def close(self) -> None:
        """Ends the stream after the messages so far."""
        self._outbox.close()

    async def next(self) -> scheduler_v1.SessionResponse | None:
        """The next message to write, with the events of those that wait behind it; None at the end."""
        messages = await self._outbox.take()
        if not messages:
            return None
        first, *others = messages
        for other in others:
            first.events.extend(other.events)
        return first


def _is_of_the_same_term(first: scheduler_v1.SessionResponse, other: scheduler_v1.SessionResponse) -> bool:
    """Whether the events of a message can be sent with those of another one before it."""
    return other.epoch == first.epoch and not other.HasField("status")
