"""A connection of the HTTP port: uvicorn's, with bounds on its headers, the time for them, and on connections.

With TLS, it counts and is idle from the time when it was accepted, before its handshake.
"""

import asyncio
import contextlib
import resource
import socket
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
MAX_HEADERS = 128

_VERSIONS = ("1.0", "1.1")  # the parser takes a request without a version for one of HTTP/0.9
_OTHER_FILES = 256
"""Open files of a gateway beside its clients' connections."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`read_timeout` is in seconds: for a TLS handshake, and for the head of a request, from then or its first byte.
    A client that reads nothing of its answers for so long is idle.
    """

    max_connections: int
    read_timeout: float
    max_per_address: int | None = None
    idle: dict["BoundedConnection", None] = field(default_factory=dict)
    """Connections without a request in progress, and those whose clients do not read, the one idle longest first."""
    by_address: dict[str, dict["BoundedConnection", None]] = field(default_factory=dict)
    """Connections of each client's address, the oldest first."""

    def admit(self, new: "BoundedConnection", address: str) -> None:
        """Counts a new connection, which is idle. Where there are too many, the one idle longest is closed."""
        self.idle[new] = None
        same = self.by_address.setdefault(address, {})
        same[new] = None
        if self.max_per_address is not None and len(same) > self.max_per_address:
            next(one for one in same if one in self.idle).close()
        elif len(new.connections) > self.max_connections:
            next(iter(self.idle)).close()

    def forget(self, connection: "BoundedConnection", address: str) -> None:
        """Counts a connection no longer."""
        self.idle.pop(connection, None)
        connections = self.by_address.setdefault(address, {})
        connections.pop(connection, None)
        if not connections:
            del self.by_address[address]


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration of a listener with limits."""

    def __init__(self, app: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(app, http=BoundedConnection, **options)
        self.limits = limits


class _Refused(Exception):  # noqa: N818
    pass


class BoundedConnection(HttpToolsProtocol):
    """Answers 431 to a request whose head is too large, and closes a connection that does not complete a head in time.

    Where there are too many connections, the one that has been idle longest is closed: those that were only opened, and
    those whose clients do not read, never keep a request out. Where none is idle, the new one is closed. Where there
    are too many of one address, it is one of these.
    """

    config: BoundedConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = self.config.limits
        self._head_bytes = 0
        # Bytes that were received and not reported by the parser, which holds an unfinished path or header in memory.
        self._unreported_bytes = 0
        self._status = 400
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._address = ""
        self._in_handshake: socket.socket | None = None

    def begin_handshake(self, accepted: socket.socket, address: str) -> None:
        """Counts a client's connection before its TLS handshake. This may close it, or another one."""
        self._address = address
        self._in_handshake = accepted
        self.connections.add(self)
        self._limits.admit(self, address)

    def end_handshake(self) -> None:
        """After a handshake, or its failure."""
        self._in_handshake = None
        if self.transport is None:
            self._discard()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        is_counted = self in self.connections
        super().connection_made(transport)
        self._await_head()
        if not is_counted:
            self._address = self.client[0] if self.client else ""
            self._limits.admit(self, self._address)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_stall_timer()
        self._limits.forget(self, self._address)
        super().connection_lost(exc)

    def close(self) -> None:
        """Closes the connection at once, whatever its client does. It counts no longer."""
        self._discard()
        if self.transport is not None:
            self.transport.abort()
        elif self._in_handshake is not None:
            with contextlib.suppress(OSError):  # the client has closed it
                # The handshake reads the end of the stream, fails, and closes the socket.
                self._in_handshake.shutdown(socket.SHUT_RDWR)

    def shutdown(self) -> None:
        if self.transport is None:
            self.close()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._limits.read_timeout, self._count_as_idle)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()
        if self._is_responding:
            self._limits.idle.pop(self, None)

    def data_received(self, data: bytes) -> None:
        if not self._is_responding:
            self._await_head()
        self._unreported_bytes += len(data)
        super().data_received(data)
        if self._unreported_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._status = 431
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Refuses what was received, or cuts off the response where the answer to it would not be the next one."""
        self._count_as_idle()  # it closes when its client has read what was sent, which may be never
        if self._is_responding:
            if self.pipeline or self.cycle.response_started or not self.cycle.more_body:
                self.transport.close()
                return
            # The bad part is of a body that its handler waits for. The handler must not answer as well.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._status == 431:
            message = f"headers take more than {MAX_HEAD_BYTES} bytes, or there are more than {MAX_HEADERS}\n".encode()
            self.transport.write(
                STATUS_LINE[431]
                + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                + b"content-length: %d\r\n\r\n%s" % (len(message), message)
            )
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._await_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers of a body in chunks count too.
        self._count(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse()

    def on_headers_complete(self) -> None:
        if self.parser.get_http_version() not in _VERSIONS:
            raise _Refused
        self._unreported_bytes = 0
        self._stop_waiting()
        self._limits.idle.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unreported_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unreported_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_responding:  # also where it is closing: its client may never read the rest
            self._count_as_idle()

    @property
    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count_as_idle(self) -> None:
        if self in self.connections:
            self._limits.idle[self] = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _discard(self) -> None:
        self._limits.forget(self, self._address)
        self.connections.discard(self)

    def _count(self, num_bytes: int) -> None:
        self._unreported_bytes -= num_bytes
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse()

    def _refuse(self) -> None:
        self._status = 431
        raise _Refused  # the parser stops, and data_received() refuses the request

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.read_timeout, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_responding:  # a pipelined request comes after this response
            self._await_head()
        elif not self.transport.is_closing():
            self.transport.close()


def allow_open_files(max_connections: int) -> None:
    """Raises the soft limit of open files to what so many connections need, where the hard limit allows that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
