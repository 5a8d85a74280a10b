"""A TCP proxy of our own: a link from one caller to one address, which can be cut, held, delayed and throttled."""

import asyncio
import contextlib
import math
import socket
import struct
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Self

_CHUNK = 2**16
_QUEUED_CHUNKS = 64
_SLICE_SECONDS = 0.05  # how long a throttled link sends at a time, so that it notices when it is whole again
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a link. `delay` is in seconds each way."""

    is_truncated: bool = False
    """Connections are reset, and new ones as soon as they are made."""
    is_held: bool = False
    """Nothing comes through, and nobody is told: a cable that was pulled."""
    delay: float = 0.0
    bytes_per_second: float = math.inf


WHOLE = Trouble()


class Link:
    """Listens on a free port of the loopback from the beginning, and serves from `start` to `close`."""

    def __init__(self, target: str) -> None:
        """`target` is the `host:port` that connections are led to."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.answered_at = -math.inf
        """When the target last said something (`monotonic`)."""
        self._trouble = WHOLE
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def num_connections(self) -> int:
        """Connections that are open now."""
        return len(self._connections)

    @property
    def trouble(self) -> Trouble:
        """What is wrong with it now."""
        return self._trouble

    @trouble.setter
    def trouble(self, trouble: Trouble) -> None:
        self._trouble = trouble
        self._changed.set()
        self._changed = asyncio.Event()
        if trouble.is_truncated:
            for connection in self._connections:
                connection.cancel()

    async def start(self) -> None:
        """Lets connections through."""
        self._server = await asyncio.start_server(self._connected, sock=self._listener)

    async def close(self) -> None:
        """Ends all connections; none is taken any more."""
        if self._server is None:
            self._listener.close()
            return
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self._trouble.is_truncated:
                return
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, far_writer, is_answer=False))
                pumps.create_task(self._pump(far_reader, writer, is_answer=True))
            for each in writers:
                each.close()  # both sides have ended in order
        except* OSError:
            pass  # nobody there, or gone in the middle: the other side is told so by a reset
        finally:
            for each in writers:
                _reset(each)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool) -> None:
        """One direction, to its end."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS)

        async def receive() -> None:
            while data := await reader.read(_CHUNK):
                if is_answer:
                    self.answered_at = monotonic()
                await queue.put((monotonic() + self._trouble.delay, data))
            await queue.put((monotonic() + self._trouble.delay, b""))

        async def send() -> None:
            while True:
                due, data = await queue.get()
                if (wait := due - monotonic()) > 0:
                    await asyncio.sleep(wait)
                if not data:
                    break
                await self._pass_on(writer, data)
            with contextlib.suppress(OSError):
                writer.write_eof()

        async with asyncio.TaskGroup() as both:
            both.create_task(receive())
            both.create_task(send())

    async def _pass_on(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        while data:
            while self._trouble.is_held:
                await self._changed.wait()
            rate = self._trouble.bytes_per_second
            size = len(data) if rate == math.inf else max(1, int(rate * _SLICE_SECONDS))
            piece, data = data[:size], data[size:]
            writer.write(piece)
            await writer.drain()
            if rate != math.inf:
                await asyncio.sleep(len(piece) / rate)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection so that the other side notices at once; does nothing where it has been closed."""
    if not writer.transport.is_closing():
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
