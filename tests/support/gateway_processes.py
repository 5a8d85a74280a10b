"""A gateway as a process of its own, for tests, connected to a scripted scheduler in the test's."""

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from environments import service_environment
from gateway_harness import Harness, plain_client, scheduler_model
from quire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from scripted_scheduler import ScriptedScheduler, serving


@dataclass(frozen=True)
class RemoteHarness(Harness):
    """A harness without the gateway, which is another process, but with its ports."""

    http_port: int
    grpc_port: int


async def start(*flags: str, **variables: str) -> Process:
    """A gateway process."""
    command = [sys.executable, "-m", "gateway_svc", *flags]
    environment = service_environment() | variables
    return await asyncio.create_subprocess_exec(*command, env=environment, stdout=DEVNULL, stderr=PIPE)


@asynccontextmanager
async def gateway_process(
    directory: Path, facts: Mapping[str, Any] | None = None, /, **variables: str
) -> AsyncIterator[tuple[Process, RemoteHarness]]:
    """A ready gateway process, killed at the end if it still runs. `facts` replace values of its scheduler's status."""
    async with serving(ScriptedScheduler(scheduler_model(directory, **(facts or {})))) as scheduler:
        process = await start(
            "--http-port=0",
            "--grpc-port=0",
            f"--schedulers-at={scheduler.address}",
            f"--model={directory}",
            **variables,
        )
        try:
            assert process.stderr is not None
            entry = json.loads(await process.stderr.readline())
            http, grpc_port = entry["http_port"], entry["grpc_port"]
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
                plain_client(http) as client,
            ):
                stub = InferenceServiceStub(channel)
                harness = RemoteHarness(None, scheduler, channel, stub, client, http, grpc_port)  # type: ignore[arg-type]
                await harness.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
                yield process, harness
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
