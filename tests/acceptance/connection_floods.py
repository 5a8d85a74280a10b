"""Opens thousands of idle connections, half-open calls, slow bodies and floods of headers to a gateway, and checks that
it answers meanwhile and how much memory it takes. Prints a summary in JSON; exits with 1 where a bound is exceeded.

    python -m tests.acceptance.connection_floods [--connections 10000]
"""

import argparse
import asyncio
import json
import resource
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from hpack import Encoder
from hyperframe.frame import HeadersFrame, SettingsFrame

from gateway_harness import Harness, encoded
from gateway_processes import gateway_process
from scripted_scheduler import answer_with
from tiny_model import EOS, make_model_directory

BASE_BYTES = 32 * 2**20
BYTES_PER_CONNECTION = 32 * 2**10
"""What a gateway may take for floods: so much, and so much more for each connection. docs/operations.md has it."""

GET = b"GET /live HTTP/1.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n{"
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()
CALLS_PER_CONNECTION = 10
_AT_ONCE = 64  # connections that are opened at a time

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def half_open_calls() -> bytes:
    """Calls whose message begins and does not end."""
    headers = [
        *((":method", "POST"), (":scheme", "http"), (":path", "/quire.inference.v1.InferenceService/Generate")),
        *((":authority", "localhost"), ("te", "trailers"), ("content-type", "application/grpc")),
    ]
    encoder, frames = Encoder(), b""
    for call in range(CALLS_PER_CONNECTION):
        stream = 2 * call + 1
        frames += HeadersFrame(stream, encoder.encode(headers), flags=["END_HEADERS"]).serialize()
        body = struct.pack(">BI", 0, 2**20) + b"\x0a"
        frames += struct.pack(">I", len(body))[1:] + struct.pack(">BBI", 0, 0, stream) + body
    return HELLO + frames


@asynccontextmanager
async def opened(port: int, count: int, sent: bytes) -> AsyncIterator[list[Stream]]:
    """Connections, on each of which the same was sent."""
    streams: list[Stream] = []
    gate = asyncio.Semaphore(_AT_ONCE)

    async def connect() -> None:
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**12)
            writer.write(sent)
            streams.append((reader, writer))

    try:
        await asyncio.gather(*(connect() for _ in range(count)))
        yield streams
    finally:
        for _, writer in streams:
            writer.close()


async def flood_headers(port: int) -> None:
    """Sends headers until the gateway closes the connection."""
    with suppress(ConnectionError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"a: ")
        for _ in range(16):
            writer.write(b"x" * 2**20)
            await writer.drain()
        writer.close()


async def answers(quire: Harness) -> float:
    """Seconds that a completion takes. Raises where it fails."""
    started = time.monotonic()
    answer = await quire.http.post("/v1/completions", json={"prompt": "a"})
    answer.raise_for_status()
    return time.monotonic() - started


def memory(pid: int) -> int:
    """Resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def flood(count: int) -> dict[str, float]:
    """Floods a gateway with `count` idle connections, half of them at each port, and a tenth as many of other kinds.

    Returns memory in bytes and the longest of the completions in seconds.
    """
    with tempfile.TemporaryDirectory() as directory:
        model = make_model_directory(Path(directory) / "tiny")
        bounds = {f"QUIRE_MAX_{kind}_CONNECTIONS": str(2 * count) for kind in ("HTTP", "GRPC")}
        async with gateway_process(model, **bounds) as (process, quire):
            quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
            http, grpc = quire.http_port, quire.grpc_port
            times, before = [await answers(quire)], memory(process.pid)
            async with opened(http, count // 2, GET), opened(grpc, count // 2, HELLO):
                times.append(await answers(quire))
                idle = memory(process.pid)
                async with opened(http, count // 20, POST) as slow, opened(grpc, count // 20, half_open_calls()):
                    await asyncio.gather(*(flood_headers(http) for _ in range(max(1, count // 200))))
                    for _, writer in slow:
                        writer.write(b" ")
                    times.append(await answers(quire))
                    most = memory(process.pid)
            times.append(await answers(quire))
    return {"before": before, "idle": idle - before, "most": most - before, "slowest": round(max(times), 3)}


def main() -> None:
    """Flood, print, and compare with the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    count: int = parser.parse_args().connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * count, hard), hard))
    found = asyncio.run(flood(count))
    bound = BASE_BYTES + BYTES_PER_CONNECTION * count
    print(json.dumps({"connections": count, **found, "bound": bound}))
    sys.exit(found["most"] > bound)


if __name__ == "__main__":
    main()
