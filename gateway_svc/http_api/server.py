"""The HTTP server: uvicorn's. With TLS it accepts connections itself, so that they count before their handshake."""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn

from gateway_svc.http_api.connection import BoundedConfig, BoundedConnection

logger = logging.getLogger("quire.gateway")

_ACCEPTED_AT_ONCE = 64
_RETRY_SECONDS = 1.0
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CLOSE_NOTIFY_SECONDS = 2.0  # for a client's answer to the end of its TLS connection
_IN_PLAIN_TEXT = b"this port has TLS: use https://\n"
_REFUSAL = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_IN_PLAIN_TEXT), _IN_PLAIN_TEXT)
)


class HttpServer(uvicorn.Server):
    """uvicorn's server, without its signal handlers, for one listening socket."""

    config: BoundedConfig

    def __init__(self, config: BoundedConfig, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None or not sockets:
            await super().startup(sockets)
            return
        await super().startup([])
        for listener in sockets:
            self.servers.append(
                _TlsListener(listener, self._tls, self.config.limits.read_timeout, self._new_connection)  # type: ignore[arg-type]
            )

    def _new_connection(self) -> BoundedConnection:
        return BoundedConnection(self.config, self.server_state, self.lifespan.state)


class _TlsListener:
    """Accepts connections in plain text, counts them, and gives each `seconds` for its TLS handshake. A request in
    plain text is answered 400.

    asyncio's own servers, which have this interface, create a connection only after its handshake.
    """

    def __init__(
        self, listener: socket.socket, tls: ssl.SSLContext, seconds: float, make: Callable[[], BoundedConnection]
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._seconds = seconds
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._handshakes: set[asyncio.Task[None]] = set()  # a loop itself keeps no task
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accepts no further connections."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """Returns at once."""

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    raise
                # The socket stays readable: without a pause this would be called again at once.
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(_RETRY_SECONDS, self._resume)
                logger.warning("cannot accept connections", extra={"why": error.strerror})
                return
            accepted.setblocking(False)
            connection = self._make()
            connection.begin_handshake(accepted, address[0] if address else "")  # without one on a Unix socket
            handshake = self._loop.create_task(self._shake_hands(accepted, connection))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket, connection: BoundedConnection) -> None:
        deadline = self._loop.time() + self._seconds
        try:
            if await self._begins_tls(accepted):
                await self._loop.connect_accepted_socket(
                    lambda: connection,
                    accepted,
                    ssl=self._tls,
                    ssl_handshake_timeout=max(deadline - self._loop.time(), 0.001),
                    ssl_shutdown_timeout=_CLOSE_NOTIFY_SECONDS,
                )
        except OSError:
            pass  # the handshake failed, or was not complete in time
        finally:
            connection.end_handshake()

    async def _begins_tls(self, accepted: socket.socket) -> bool:
        """Whether a client sends what may be a handshake; else its connection is closed, with an answer to a request
        in plain text. Raises OSError.
        """
        begins = False
        is_readable = asyncio.Event()
        self._loop.add_reader(accepted, is_readable.set)
        try:
            async with asyncio.timeout(self._seconds):
                await is_readable.wait()
            self._loop.remove_reader(accepted)
            first = accepted.recv(1, socket.MSG_PEEK)
            begins = first != b"" and not first.isalpha()  # a method begins with a letter, and no record of TLS does
            if first.isalpha():
                await self._refuse(accepted)
        finally:
            if not begins:
                self._loop.remove_reader(accepted)
                accepted.close()
        return begins

    async def _refuse(self, accepted: socket.socket) -> None:
        """Answers a request in plain text, and reads the rest of it: a socket that is closed with something left to
        read resets its connection.
        """
        accepted.send(_REFUSAL)
        accepted.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_CLOSE_NOTIFY_SECONDS):
            while await self._loop.sock_recv(accepted, 2**16):
                pass
