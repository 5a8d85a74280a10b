"""A request that is live, and who listens to it."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc.request_log import RequestLog
from scheduler_svc.tracing import RequestTrace

_DURABLE_STRIDE = 32  # tokens of a sequence that become durable before its gateways are told


class Listener(Protocol):
    """A session: what the engine tells a gateway."""

    def send(self, message: scheduler_v1.SessionResponse) -> None:
        """Pass on a message's events, all of one step at once. The message is the listener's from now on."""

    def send_status(self, status: scheduler_v1.Status) -> None:
        """Pass on a change of what is served."""


class LiveRequest:
    """One request that has not ended."""

    __slots__ = ("_delivered", "_sent", "is_recovering", "listeners", "log", "timer", "trace")

    def __init__(self, log: RequestLog) -> None:
        self.log = log
        self.is_recovering = False
        self.listeners: list[Listener] = []
        self.timer: asyncio.TimerHandle | None = None
        self.trace: RequestTrace | None = None
        self._delivered = [0] * len(log.sequences)
        self._sent = [0] * len(log.sequences)

    @property
    def num_delivered(self) -> list[int]:
        """Of each sequence, how many tokens gateways were given in this term."""
        if self.listeners:
            self._delivered = [len(sequence.token_ids) for sequence in self.log.sequences]
        return self._delivered

    def join(self, listener: Listener) -> None:
        """A session takes part from now on."""
        if listener not in self.listeners:
            self.listeners.append(listener)
        self.stop_timer()

    def leave(self, listener: Listener) -> bool:
        """A session takes part no more; whether it was the last one."""
        self._delivered = self.num_delivered
        self.listeners.remove(listener)
        return not self.listeners

    def drop_listeners(self) -> None:
        """It is over: nobody takes part any more."""
        self._delivered = self.num_delivered
        self.listeners.clear()

    def durable_update(self, index: int) -> scheduler_v1.Event | None:
        """That the store has more of a sequence, where that is worth telling."""
        if index >= len(self._sent):
            return None  # of a search, whose results are its end
        sequence = self.log.sequences[index]
        if sequence.num_durable - self._sent[index] < _DURABLE_STRIDE and not sequence.is_end_durable:
            return None
        self._sent[index] = sequence.num_durable
        durable = scheduler_v1.Durable(index=index, num_tokens=sequence.num_durable)
        return scheduler_v1.Event(key=self.log.key, durable=durable)

    def start_timer(self, seconds: float, callback: Callable[["LiveRequest"], None]) -> None:
        """Have something done later, unless somebody comes or it is over by then."""
        self.stop_timer()
        self.timer = asyncio.get_running_loop().call_later(seconds, callback, self)

    def stop_timer(self) -> None:
        """What was to be done later is not."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
