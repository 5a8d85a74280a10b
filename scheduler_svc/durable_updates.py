"""Sends gateways which tokens are durable."""

import asyncio
from collections.abc import Callable

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.live_request import LiveRequest
from scheduler_svc.session_wire import message_of


class DurableUpdates:
    """What the journal's calls have written. The events of one call are sent together."""

    def __init__(self, epoch: Callable[[], int]) -> None:
        """`epoch` is that of messages to gateways."""
        self._epoch = epoch
        self._pending: dict[GatewaySession, list[scheduler_v1.Event]] = {}

    def add(self, live: LiveRequest, index: int) -> None:
        """The store has more of a sequence, or its end: its gateways are sent an event soon."""
        sessions = live.gateways or live.awaiting_end
        event = live.durable_update(index) if sessions else None
        if event is None:
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._send)
        for session in sessions:
            self._pending.setdefault(session, []).append(event)

    def _send(self) -> None:
        batches, self._pending = self._pending, {}
        for session, batch in batches.items():
            session.send(message_of(self._epoch(), *batch))
