"""Measures gRPC alone: a message there and back, the part of a step's round trip that is not Quire's code.

    python -m benchmarks.steps.exchange serve --port PORT
    python -m benchmarks.steps.exchange call --port PORT --messages N --times FILE

The two processes stand for scheduler and worker, and idle for 10 ms before each message.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import grpc
import uvloop

from benchmarks.processes import BenchmarkFailed, running
from svc_common.channels import internal_channel
from svc_common.grpc_polling import EXPERIMENTS, NO_EVENT_ENGINE
from svc_common.server import INTERNAL_MESSAGE_BYTES, bind, create_server, run_until_signal
from svc_common.supervisor.addresses import free_port

POLLING = {"direct": NO_EVENT_ENGINE, "event_engine": ""}
"""Which thread reads the sockets, and the value of GRPC_EXPERIMENTS that makes it so."""
MESSAGE_BYTES = 1500
"""About a step of 256 sequences, and its answer."""

_SERVICE, _METHOD = "quire.benchmarks.Echo", "Exchange"
_NUM_WARM_UP = 30
_PAUSE = 0.01
_START_SECONDS, _MESSAGE_SECONDS = 60.0, 1.0  # far more than it takes


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """A message there and back, in milliseconds: its duration, and processor time of the side that sent first."""

    round_trip: float
    processor: float


def measure_exchange(polling: str, num_messages: int) -> ExchangeTimes:
    """The median message. In processes of its own: gRPC reads the setting once. Raises BenchmarkFailed."""
    environment = {EXPERIMENTS: POLLING[polling]}
    program = (sys.executable, "-m", "benchmarks.steps.exchange")
    with TemporaryDirectory(prefix="quire-exchange-") as folder:
        port, times = str(free_port()), Path(folder, "times.json")
        serve = (*program, "serve", "--port", port)
        call = (*program, "call", "--port", port, "--messages", str(num_messages), "--times", str(times))
        with running("echo", serve, environment), running("exchange", call, environment) as caller:
            with suppress(TimeoutExpired):
                caller.popen.wait(_START_SECONDS + num_messages * _MESSAGE_SECONDS)
            if not times.exists():
                raise BenchmarkFailed(f"messages were not exchanged:\n{caller.last_lines()}")
            return ExchangeTimes(**json.loads(times.read_bytes()))


async def _echo(
    requests: AsyncIterator[bytes], _context: "grpc.aio.ServicerContext[bytes, bytes]"
) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _serve(port: int) -> None:
    server = create_server(max_message_bytes=INTERNAL_MESSAGE_BYTES)
    methods: dict[str, Any] = {_METHOD: grpc.stream_stream_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, methods)])
    bind(server, "127.0.0.1", port)
    await server.start()
    await run_until_signal(lambda: server.stop(0))


async def _call(port: int, num_messages: int) -> ExchangeTimes:
    message = bytes(MESSAGE_BYTES)
    async with internal_channel(f"127.0.0.1:{port}") as channel:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
        call = method(wait_for_ready=True)
        seconds, processor = [], []
        for _ in range(_NUM_WARM_UP + num_messages):
            await asyncio.sleep(_PAUSE)
            began, used = perf_counter(), process_time()
            await call.write(message)
            await call.read()
            seconds.append(perf_counter() - began)
            processor.append(process_time() - used)
        call.cancel()
    return ExchangeTimes(median(seconds[_NUM_WARM_UP:]) * 1e3, median(processor[_NUM_WARM_UP:]) * 1e3)


def main() -> None:
    """Reads flags; serves, or calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    roles = parser.add_subparsers(dest="role", required=True)
    serve, call = roles.add_parser("serve"), roles.add_parser("call")
    for role in (serve, call):
        role.add_argument("--port", type=int, required=True)
    call.add_argument("--messages", type=int, required=True, help="how many count")
    call.add_argument("--times", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    if options.role == "serve":
        uvloop.run(_serve(options.port))
        return
    exchange = uvloop.run(_call(options.port, options.messages))
    options.times.write_text(json.dumps(asdict(exchange)))


if __name__ == "__main__":
    main()
