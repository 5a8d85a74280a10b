"""A connection of the HTTP port: uvicorn's, with bounds on its headers, the time for them, pipelined requests, and
connections.

With TLS, it counts and is idle from the time when it was accepted, before its handshake.
"""

import asyncio
import contextlib
import resource
import socket
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway_svc.http_api.connection_limits import ConnectionLimits, CountedConnection
from gateway_svc.http_api.exchange import DRAIN
from gateway_svc.http_api.websocket_connection import BoundedWebSocket
from gateway_svc.refusals import Protocol, Refusal

MAX_HEAD_BYTES = 64 * 2**10
MAX_HEADERS = 128

_PART_BYTES = 256
"""What is parsed at once, unless a body is longer: further requests may be queued only if they are in the same part."""
_MAX_HELD_BYTES = 64 * 2**10
"""Of what a client sends before its request is answered: a connection that holds more is not read."""
_VERSIONS = ("1.0", "1.1")  # the parser takes a request without a version for one of HTTP/0.9
_INVALID = "Invalid HTTP request received."
_OTHER_FILES = 256
"""Open files of a gateway beside its clients' connections."""


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration of a listener with limits."""

    def __init__(self, app: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(app, http=BoundedConnection, ws=BoundedWebSocket, **options)
        self.limits = limits


class _UnchunkedCycle(RequestResponseCycle):
    """Answers a client of HTTP/1.0, which does not know chunks: an answer without a length ends with the connection."""

    async def send(self, message: Any) -> None:
        self.chunked_encoding = False
        self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _Refused(Exception):  # noqa: N818
    pass


class BoundedConnection(CountedConnection, HttpToolsProtocol):
    """Answers 431 to a request whose head is too large, and closes a connection that does not complete a head in time.

    Where there are too many connections, the one that has been idle longest is closed: those that were only opened, and
    those whose clients do not read, never keep a request out. Where none is idle, the new one is closed. Where there
    are too many of one address, it is one of these.

    A request is parsed when the one before it is answered: a client may send thousands at once, and each takes memory
    as soon as it is parsed.
    """

    config: BoundedConfig
    protocol: Protocol = "http"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = self.config.limits
        self._head_bytes = 0
        # Bytes that were received and not reported by the parser, which holds an unfinished path or header in memory.
        self._unreported_bytes = 0
        self._held = bytearray()  # received, and not parsed yet
        self._body_bytes_left = 0  # of the body that arrives, if it has a length
        self._running: RequestResponseCycle | None = None  # the latest that has begun; `cycle` may be a queued one
        self._status = 400
        self._head_timer: asyncio.TimerHandle | None = None
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
        self._held.clear()
        if self._running is not None:
            self.cycle = self._running  # the next call ends this one; those that are queued have not begun
        super().connection_lost(exc)

    def close(self) -> None:
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

    def handle_websocket_upgrade(self) -> None:
        self._held.clear()  # a client sends messages after the answer to its handshake
        if self.is_responding:  # to a request before this one: its answer would mix with the frames
            self.transport.close()
            return
        self._stop_waiting()
        self.stop_stall_timer()
        self._limits.forget(self, self._address)
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        # Or the wait for this request would end the connection while the request is answered.
        self._unset_keepalive_if_required()
        if not self.is_responding:
            self._await_head()
        self._held += data
        self._parse_held()

    def _parse_held(self) -> None:
        """Parses what was received, part by part, until a whole request waits for its answer."""
        at = 0
        while at < len(self._held) and not self._has_whole_request:
            part = self._held[at : at + max(_PART_BYTES, self._body_bytes_left)]
            at += len(part)
            self._unreported_bytes += len(part)
            self._parse(part)
            if self._unreported_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._status = 431
                self.send_400_response("")
            if self.transport.is_closing():
                self._held.clear()
        del self._held[:at]
        if len(self._held) > _MAX_HELD_BYTES:  # with less, a client that leaves is noticed
            self.flow.pause_reading()

    @property
    def _has_whole_request(self) -> bool:
        """Whether a request has arrived as a whole and is not answered, or one is queued behind it."""
        return self.is_responding and (not self.cycle.more_body or bool(self.pipeline))

    def _parse(self, data: bytes | bytearray) -> None:
        """As uvicorn, which loses the body of a request that offers another protocol, or takes it for a request."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self._ignores_upgrade:
                (num_parsed,) = upgrade.args
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._parse(head + data[num_parsed:])
        except httptools.HttpParserError:
            self.logger.warning(_INVALID)
            self.send_400_response(_INVALID)

    def _get_upgrade(self) -> bytes | None:
        """The protocol that the client offers. A request may have several Connection headers, of which uvicorn takes
        the last one.
        """
        values = [value for name, value in self.headers if name == b"connection"]
        if b"upgrade" not in [token.strip().lower() for token in b",".join(values).split(b",")]:
            return None
        return next((value.lower() for name, value in reversed(self.headers) if name == b"upgrade"), None)

    @property
    def _ignores_upgrade(self) -> bool:
        """Whether the client offers a protocol that is not served, such as h2c. Java's HttpClient does by default."""
        return self.parser.should_upgrade() and self._get_upgrade() is not None and not self._should_upgrade()

    def _head_without_upgrade(self) -> bytes:
        """The head of the request, as it was parsed."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        """Refuses what was received, or cuts off the response where the answer to it would not be the next one."""
        self._limits.refuse("http", Refusal.TOO_LARGE if self._status == 431 else Refusal.MALFORMED)
        self.count_as_idle()  # it closes when its client has read what was sent, which may be never
        if self.is_responding:
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
        self.scope["state"][DRAIN] = self.flow.drain

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
        if self._ignores_upgrade:  # this head is parsed again
            return
        self._stop_waiting()
        self.count_as_busy()
        self._body_bytes_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _UnchunkedCycle

    def on_body(self, body: bytes) -> None:
        self._unreported_bytes = 0
        self._body_bytes_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unreported_bytes = 0
        if not self._ignores_upgrade:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        assert self._running is not None
        self._running.body = bytearray()  # its handler may not have read it, and the connection may stay open
        super().on_response_complete()
        if self.transport.is_closing():
            self._held.clear()
        elif self._held:
            self.data_received(b"")  # goes on with what came during the answer
        if not self.is_responding:  # also where it is closing: its client may never read the rest
            self.count_as_idle()

    @property
    def is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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
        if self.is_responding:  # a pipelined request comes after this response
            self._await_head()
        elif not self.transport.is_closing():
            self._limits.refuse("http", Refusal.TOO_LATE)
            self.transport.close()


def allow_open_files(max_connections: int) -> None:
    """Raises the soft limit of open files to what so many connections need, where the hard limit allows that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
