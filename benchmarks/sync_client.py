"""Compares the blocking client with one on the asyncio client's event loop, in turns (docs/design/sync-client.md).

    python -m benchmarks.sync_client [--runs 9]

Both call a server in another process, which streams chunks at once or one every 1.5 ms. The second client runs the
asyncio client on a background thread. Finally a process uses each, forks, and uses a new client in the child.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextvars import copy_context
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from statistics import median
from typing import Any, Protocol

import grpc

from benchmarks.processes import running
from benchmarks.record import ROOT
from benchmarks.report import Cells
from benchmarks.runner import failures_exit, in_turns, median_of
from quire.inference.v1 import inference_pb2 as pb
from quire_client import AsyncClient, Chunk, Client
from svc_common.supervisor.addresses import free_port

NUM_CHUNKS, NUM_PACED_CHUNKS, NUM_CALLS = 2000, 300, 300
PACE_MS = 1.5
FORK_SECONDS = 10


class BlockingClient(Protocol):
    """What is measured of a client."""

    def stream(self, prompt: str, *, max_tokens: int, temperature: float) -> Any: ...
    def models(self) -> Any: ...
    def close(self) -> None: ...


class ThreadedClient:
    """The asyncio client in an event loop on a background thread."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client = AsyncClient(address)

    def stream(self, prompt: str, *, max_tokens: int, temperature: float) -> Iterator[Chunk]:
        async def read(emit: Callable[[Any], None]) -> None:
            async for chunk in self._client.stream(prompt, max_tokens=max_tokens, temperature=temperature):
                emit(chunk)

        return self._run(read)

    def models(self) -> Any:
        async def call(emit: Callable[[Any], None]) -> None:
            emit(await self._client.models())

        return next(self._run(call))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, start: Callable[[Callable[[Any], None]], Coroutine[Any, Any, None]]) -> Iterator[Any]:
        """What a coroutine on the loop emits; leaving the iteration cancels it."""
        events: SimpleQueue[Any] = SimpleQueue()
        tasks: list[asyncio.Task[None]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(start(events.put)))
            tasks[0].add_done_callback(events.put)

        self._loop.call_soon_threadsafe(begin, context=copy_context())
        try:
            while (event := events.get()) not in tasks:
                yield event
            event.result()
        finally:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())


CLIENTS: dict[str, Callable[[str], BlockingClient]] = {"gRPC's blocking channels": Client, "asyncio": ThreadedClient}


@dataclass(frozen=True)
class ClientFigures:
    """Microseconds. `latency` is from the server's write to the caller, `processor` time that of the client."""

    chunk: float
    chunk_processor: float
    paced_latency: float
    paced_processor: float
    unary_call: float


async def stream_chunks(request: pb.StreamGenerateRequest, _: Any) -> AsyncIterator[pb.StreamGenerateResponse]:
    """As many chunks as requested. The temperature is the pause before each, in milliseconds."""
    generation = request.generation
    acceptance = pb.Acceptance(request_id=generation.request_id, model="model", seed=1)
    yield pb.StreamGenerateResponse(acceptance=acceptance)
    count, pause = generation.stopping.max_tokens, generation.sampling.temperature / 1e3
    for place in range(count):
        if pause:
            await asyncio.sleep(pause)
        finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH) if place == count - 1 else None
        chunk = pb.Chunk(offset=place, text=repr(time.monotonic()), token_ids=[5], finish=finish)
        yield pb.StreamGenerateResponse(chunk=chunk)
    yield pb.StreamGenerateResponse(usage=pb.Usage(prompt_tokens=1, completion_tokens=count))


async def list_models(_request: pb.ListModelsRequest, _: Any) -> pb.ListModelsResponse:
    return pb.ListModelsResponse(models=[pb.Model(name="model")])


async def serve(port: int) -> None:
    """Until a signal."""
    methods: dict[str, Any] = {
        "StreamGenerate": grpc.unary_stream_rpc_method_handler(
            stream_chunks, pb.StreamGenerateRequest.FromString, pb.StreamGenerateResponse.SerializeToString
        ),
        "ListModels": grpc.unary_unary_rpc_method_handler(
            list_models, pb.ListModelsRequest.FromString, pb.ListModelsResponse.SerializeToString
        ),
    }
    server = grpc.aio.server()
    service = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def measure(client: BlockingClient) -> ClientFigures:
    """One run."""
    began, used = time.perf_counter(), time.process_time()
    for _ in client.stream("x", max_tokens=NUM_CHUNKS, temperature=0):
        pass
    chunk, chunk_processor = time.perf_counter() - began, time.process_time() - used
    used = time.process_time()
    paced = client.stream("x", max_tokens=NUM_PACED_CHUNKS, temperature=PACE_MS)
    latencies = [time.monotonic() - float(one.text) for one in paced]
    paced_processor = time.process_time() - used
    began = time.perf_counter()
    for _ in range(NUM_CALLS):
        client.models()
    return ClientFigures(
        chunk / NUM_CHUNKS * 1e6,
        chunk_processor / NUM_CHUNKS * 1e6,
        median(latencies) * 1e6,
        paced_processor / NUM_PACED_CHUNKS * 1e6,
        (time.perf_counter() - began) / NUM_CALLS * 1e6,
    )


def survives_fork(name: str, address: str) -> bool:
    """Whether a new client works in a child that was forked after a client of this kind was used."""
    command = (sys.executable, "-m", "benchmarks.sync_client", "--fork", name, "--address", address)
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL, check=False).returncode == 0


def fork(name: str, address: str) -> int:
    """The exit status of the forked child."""
    client = CLIENTS[name](address)
    client.models()
    child = os.fork()
    if not child:
        signal.alarm(FORK_SECONDS)
        CLIENTS[name](address).models()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="runs of each; default 9")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)  # the port of the process that serves
    parser.add_argument("--fork", choices=CLIENTS, help=argparse.SUPPRESS)  # the client of the process that forks
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
    if options.fork is not None:
        sys.exit(fork(options.fork, options.address) != 0)
    port = free_port()
    address = f"127.0.0.1:{port}"
    figures: dict[str, list[ClientFigures]] = {name: [] for name in CLIENTS}
    command = (sys.executable, "-m", "benchmarks.sync_client", "--serve", str(port))
    with failures_exit("sync_client"), running("server", command) as server:
        clients = {name: make(address) for name, make in CLIENTS.items()}
        server.wait_until(lambda: _answers(clients.values()), 60)
        for _, name in in_turns(list(CLIENTS), options.runs + 1):
            figures[name].append(measure(clients[name]))
        forks = {name: "works" if survives_fork(name, address) else "fails" for name in CLIENTS}
    rows = []
    for name, runs in figures.items():
        medians = asdict(median_of(runs[1:]))  # the first run warms up
        rows.append([name, *(f"{value:.0f}" for value in medians.values()), forks[name]])
    columns = ("client on", "a chunk, µs", "processor, µs", "paced: latency, µs", "processor, µs", "unary call, µs")
    Cells((*columns, "after a fork"), rows).print("Blocking clients")


def _answers(clients: Any) -> bool | None:
    try:
        for client in clients:
            client.models()
    except Exception:
        return None
    return True


if __name__ == "__main__":
    main()
