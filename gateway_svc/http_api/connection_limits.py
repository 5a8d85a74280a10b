"""How many connections the HTTP port holds, and which of them is closed for a new one."""

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway_svc import refusals
from gateway_svc.refusals import Refusal, Refuse


class Closable(Hashable, Protocol):
    """A connection that can be closed for another one."""

    connections: set[Any]
    """All connections of the port."""
    protocol: refusals.Protocol

    def close(self) -> None:
        """Closes it at once, whatever its client does. It counts no longer."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`read_timeout` is in seconds: for a TLS handshake, for the head of a request, from then or its first byte, and
    for a message of a WebSocket. A client that reads nothing of its answers for so long is idle.
    """

    max_connections: int
    read_timeout: float
    refuse: Refuse
    max_per_address: int | None = None
    idle: dict[Closable, None] = field(default_factory=dict)
    """Connections without a request in progress, and those whose clients do not read, the one idle longest first."""
    by_address: dict[str, dict[Closable, None]] = field(default_factory=dict)
    """Connections of each client's address, the oldest first."""

    def admit(self, new: Closable, address: str) -> None:
        """Counts a new connection, which is idle. Where there are too many, the one idle longest is closed."""
        self.idle[new] = None
        same = self.by_address.setdefault(address, {})
        same[new] = None
        if self.max_per_address is not None and len(same) > self.max_per_address:
            self._close_for_another(next(one for one in same if one in self.idle))
        elif len(new.connections) > self.max_connections:
            self._close_for_another(next(iter(self.idle)))

    def _close_for_another(self, connection: Closable) -> None:
        self.refuse(connection.protocol, Refusal.CONNECTIONS)
        connection.close()

    def forget(self, connection: Closable, address: str) -> None:
        """Counts a connection no longer."""
        self.idle.pop(connection, None)
        connections = self.by_address.setdefault(address, {})
        connections.pop(connection, None)
        if not connections:
            del self.by_address[address]


class CountedConnection(asyncio.Protocol):
    """A connection that is idle without a request in progress, or while its client reads nothing for too long."""

    connections: set[Any]
    protocol: refusals.Protocol
    loop: asyncio.AbstractEventLoop
    _limits: ConnectionLimits
    _address = ""
    _stall_timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        raise NotImplementedError

    @property
    def is_responding(self) -> bool:
        """Whether a request is in progress."""
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_stall_timer()
        self._limits.forget(self, self._address)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._limits.read_timeout, self.count_as_idle)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_stall_timer()
        if self.is_responding:
            self.count_as_busy()

    def count_as_idle(self) -> None:
        if self in self.connections:
            self._limits.idle[self] = None

    def count_as_busy(self) -> None:
        self._limits.idle.pop(self, None)

    def stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
