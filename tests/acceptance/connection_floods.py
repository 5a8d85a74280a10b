"""Opens thousands of idle connections, half-open calls, slow and large bodies and floods of headers to a gateway, and
checks that it answers another tenant in time meanwhile, and how much memory it takes. Prints a summary in JSON; exits
with 1 where a bound is exceeded.

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
BODY_BYTES = 128 * 2**20
"""What the gateway is set to take for bodies, beside that."""
MAX_SECONDS = 5.0
"""The time within which the other tenant has each of its answers, ten times what is usual."""

GET = b"GET /live HTTP/1.1\r\n"
KEYS = {name: f"the-own-key-of-{name}" for name in ("flood", "user")}
POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"x-api-key: %s\r\ncontent-length: 16000000\r\n\r\n{" % KEYS["flood"].encode()
)
LARGE_BYTES = 8 * 2**20  # that are sent of each large body
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()
CALLS_PER_CONNECTION = 10
_AT_ONCE = 64  # connections that are opened at a time

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def half_open_calls() -> bytes:
    """Calls whose message begins and does not end."""
    headers = [
        *((":method", "POST"), (":scheme", "http"), (":path", "/quire.inference.v1.InferenceService/Generate")),
        *((":authority", "localhost"), ("te", "trailers"), ("content-type", "application/grpc")),
        ("x-api-key", KEYS["flood"]),
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


async def send_large(stream: Stream) -> None:
    """Sends a part of a large body, which the gateway keeps or refuses."""
    _, writer = stream
    with suppress(ConnectionError):
        for _ in range(LARGE_BYTES // 2**20):
            writer.write(b" " * 2**20)
            await writer.drain()


async def answers(quire: Harness) -> float:
    """Seconds that a completion of another tenant takes. Raises where it fails."""
    started = time.monotonic()
    answer = await quire.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-api-key": KEYS["user"]})
    answer.raise_for_status()
    return time.monotonic() - started


@asynccontextmanager
async def answered_all_the_time(quire: Harness) -> AsyncIterator[list[float]]:
    """The other tenant sends one completion after another until the end of `async with`. Their times in seconds."""
    times: list[float] = []
    is_over = asyncio.Event()

    async def ask() -> None:
        while not is_over.is_set():
            times.append(await answers(quire))

    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        try:
            yield times
        finally:
            is_over.set()


def num_open(streams: list[Stream]) -> int:
    """How many connections the gateway has not closed."""
    return sum(not reader.at_eof() for reader, _ in streams)


def memory(pid: int) -> int:
    """Resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def flood(count: int) -> dict[str, float]:
    """Floods a gateway with `count` idle connections, half of them at each port, and a tenth as many of other kinds;
    a 50th as many, but at least 32, send large bodies.

    Another tenant sends completions all the time. Returns memory in bytes, how many of the idle connections were open
    when it was read, and the longest of the completions in seconds.
    """
    with tempfile.TemporaryDirectory() as directory:
        model = make_model_directory(Path(directory) / "tiny")
        keys = Path(directory) / "keys.toml"
        keys.write_text("".join(f'[[keys]]\nkey = "{key}"\ntenant = "{name}"\n' for name, key in KEYS.items()))
        bounds = {f"QUIRE_MAX_{kind}_CONNECTIONS": str(2 * count) for kind in ("HTTP", "GRPC")}
        bounds |= {"QUIRE_BODY_MEMORY": str(BODY_BYTES / 2**30), "QUIRE_API_KEYS": str(keys)}
        async with gateway_process(model, **bounds) as (process, quire):
            quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
            http, grpc = quire.http_port, quire.grpc_port
            await answers(quire)
            before = memory(process.pid)
            async with (
                answered_all_the_time(quire) as times,
                opened(http, count // 2, GET) as gets,
                opened(grpc, count // 2, HELLO) as hellos,
            ):
                await answers(quire)
                idle, held = memory(process.pid), num_open([*gets, *hellos])
                async with opened(http, count // 20, POST) as slow, opened(grpc, count // 20, half_open_calls()):
                    await asyncio.gather(*(flood_headers(http) for _ in range(max(1, count // 200))))
                    for _, writer in slow:
                        writer.write(b" ")
                    await answers(quire)
                    async with opened(http, max(32, count // 50), POST) as large:
                        await asyncio.gather(*map(send_large, large))
                        await answers(quire)
                        most = memory(process.pid)
    return {
        "before": before,
        "open": held,
        "idle": idle - before,
        "most": most - before,
        "answers": len(times),
        "slowest": round(max(times), 3),
    }


def bound_of(count: int) -> int:
    """Bytes that the gateway may take for so many connections."""
    return BASE_BYTES + BYTES_PER_CONNECTION * count + BODY_BYTES


def main() -> None:
    """Flood, print, and compare with the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    count: int = parser.parse_args().connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * count, hard), hard))
    found = asyncio.run(flood(count))
    print(json.dumps({"connections": count, **found, "bound": bound_of(count), "max_seconds": MAX_SECONDS}))
    is_within = found["most"] <= bound_of(count) and found["slowest"] <= MAX_SECONDS
    sys.exit(0 if is_within and found["open"] == 2 * (count // 2) else 1)


if __name__ == "__main__":
    main()
