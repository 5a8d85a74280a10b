"""The scheduler as a process, for a test."""

import asyncio
import json
import signal
import sys
import urllib.error
import urllib.request
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from environments import scheduler_environment
from prometheus_page import read_samples
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from scheduler_harness import TIMEOUT, SessionClient

SERVICE = scheduler_v1.DESCRIPTOR.services_by_name["SchedulerService"].full_name
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class SchedulerProcess:
    """`ports` are those of its log line "ready", `entries` the later lines of its log."""

    def __init__(self, process: Process, channel: grpc.aio.Channel, ports: dict[str, int]) -> None:
        self.process = process
        self.ports = ports
        self.entries: list[dict[str, Any]] = []
        self._channel = channel
        self._health = health_pb2_grpc.HealthStub(channel)

    async def until(self, name: str, status: int) -> None:
        """Waits until a health service has this status."""
        async with asyncio.timeout(TIMEOUT):
            while True:
                with suppress(grpc.aio.AioRpcError):
                    if (await self._health.Check(health_pb2.HealthCheckRequest(service=name))).status == status:
                        return
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SessionClient]:
        client = SessionClient(SchedulerServiceStub(self._channel).Session())
        yield client
        client.call.cancel()

    async def metrics(self) -> dict[str, float]:
        """All samples, by name and labels."""
        url = f"http://127.0.0.1:{self.ports['metrics_port']}/metrics"
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=TIMEOUT) as response:
            return read_samples(response.read().decode())

    async def health(self) -> dict[str, Any]:
        """The answer of `/health` on the metrics port, of a standby, too."""
        url = f"http://127.0.0.1:{self.ports['metrics_port']}/health"
        try:
            response = await asyncio.to_thread(urllib.request.urlopen, url, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:  # 503
            response = error
        with response:
            answer: dict[str, Any] = json.load(response)
            return answer

    async def read_log(self) -> None:
        """Keeps the entries of its log until it ends."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            with suppress(ValueError):
                self.entries.append(json.loads(line))

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The entries of an event."""
        return [entry for entry in self.entries if entry["event"] == event]

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), TIMEOUT)


@asynccontextmanager
async def scheduler_process(redis_url: str, port: int, **variables: str) -> AsyncIterator[SchedulerProcess]:
    environment = scheduler_environment(redis_url, f"127.0.0.1:{port}") | {"QUIRE_LEASE_SECONDS": "3"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler_svc", env=environment | variables, stdout=DEVNULL, stderr=PIPE, limit=2**20
    )
    assert process.stderr is not None
    entry = json.loads(await process.stderr.readline())
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{entry['port']}")
    running = SchedulerProcess(process, channel, entry)
    reading = asyncio.create_task(running.read_log())
    try:
        async with channel:
            yield running
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
        await process.wait()
        await reading
