"""A TCP proxy from one caller to one address. Its connections can be reset, stalled, delayed and throttled."""

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
_SLICE_SECONDS = 0.05  # a throttled link sends this much at once, so it applies a new fault soon
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class LinkFault:
    """The fault of a link. `delay` is in seconds, in each direction."""

    is_reset: bool = False
    """Open connections are reset, and new ones as soon as they are accepted."""
    is_stalled: bool = False
    """No data is forwarded and no connection is closed, as with a pulled cable."""
    delay: float = 0.0
    bytes_per_second: float = math.inf


NO_FAULT = LinkFault()


class Link:
    """Listens on a free port of the loopback from its creation, and serves from `start` to `close`."""

    def __init__(self, target: str) -> None:
        """`target` is the `host:port` that connections are forwarded to."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.last_response_at = -math.inf
        """When the target last sent data, by `monotonic`."""
        self._fault = NO_FAULT
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    @property
    def fault(self) -> LinkFault:
        """The present fault. Setting it affects open connections at once."""
        return self._fault

    @fault.setter
    def fault(self, fault: LinkFault) -> None:
        self._fault = fault
        self._changed.set()
        self._changed = asyncio.Event()
        if fault.is_reset:
            for connection in self._connections:
                connection.cancel()

    async def start(self) -> None:
        """Starts to accept connections."""
        self._server = await asyncio.start_server(self._connected, sock=self._listener)

    async def close(self) -> None:
        """Closes all connections and the listener."""
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
            if self._fault.is_reset:
                return
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            writers.append(target_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, target_writer, is_response=False))
                group.create_task(self._pump(target_reader, writer, is_response=True))
            for each in writers:
                each.close()  # both sides have sent EOF
        except* OSError:
            pass  # the target is not there, or a connection broke: the other side gets a reset
        finally:
            for each in writers:
                _reset(each)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_response: bool) -> None:
        """Forwards one direction until EOF."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS)

        async def receive() -> None:
            while data := await reader.read(_CHUNK):
                if is_response:
                    self.last_response_at = monotonic()
                await queue.put((monotonic() + self._fault.delay, data))
            await queue.put((monotonic() + self._fault.delay, b""))

        async def send() -> None:
            while True:
                due, data = await queue.get()
                if (wait := due - monotonic()) > 0:
                    await asyncio.sleep(wait)
                if not data:
                    break
                await self._forward(writer, data)
            with contextlib.suppress(OSError):
                writer.write_eof()

        async with asyncio.TaskGroup() as both:
            both.create_task(receive())
            both.create_task(send())

    async def _forward(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        while data:
            while self._fault.is_stalled:
                await self._changed.wait()
            rate = self._fault.bytes_per_second
            size = len(data) if rate == math.inf else max(1, int(rate * _SLICE_SECONDS))
            part, data = data[:size], data[size:]
            writer.write(part)
            await writer.drain()
            if rate != math.inf:
                await asyncio.sleep(len(part) / rate)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes a connection with RST; does nothing if it is closed already."""
    if not writer.transport.is_closing():
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
