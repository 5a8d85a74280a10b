"""A worker that has served an epoch outside the window: the leader orders its restart, and its supervisor starts it."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from deployment import Deployment, deployment
from inner_calls import token
from quire.worker.v1 import worker_pb2
from quire.worker.v1.worker_pb2_grpc import WorkerServiceStub
from quire_client import AsyncClient
from svc_common.service_roles import ServiceRole

DAY = 86400 * 10**6  # microseconds
TIMEOUT = 120  # seconds
PROMPT = [5, 6, 7]
ANSWER: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
# Python runs this at the start of each process of the deployment.
_CLOCK_OF_THE_WORKER = """
import sys, time
if "worker_svc" in sys.orig_argv:
    clock = time.time_ns
    time.time_ns = lambda: clock() + 10 * 86400 * 10**9
"""


@pytest.fixture
async def running(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    """One of each role. The clock of the worker is ten days ahead."""
    (tmp_path / "sitecustomize.py").write_text(_CLOCK_OF_THE_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with deployment(model=str(tiny_model), num_blocks=50, num_threads=1) as started:
        yield started


async def why_set_apart(running: Deployment) -> dict[str, str]:
    """Workers that are set apart, by address, as operators see them. The gateway's health has their number."""
    with running.admin() as admin:
        found = {apart.worker: apart.why for apart in admin.requests().workers_set_apart}
    async with httpx.AsyncClient(base_url=running.http) as http:
        if (await http.get("/health")).json()["workers_set_apart"] != len(found):
            return {}  # the gateway has not been sent it yet
    return found


async def until_set_apart(running: Deployment, why: str) -> None:
    async with asyncio.timeout(TIMEOUT):
        while why not in (await why_set_apart(running)).get(running.state["workers"][0], ""):
            await asyncio.sleep(0.05)


async def test_the_supervisor_starts_the_worker_that_a_leader_has_ordered_to_restart(running: Deployment) -> None:
    credential = token(running.secret_file.read_bytes().strip(), ServiceRole.SCHEDULER, ServiceRole.WORKER)
    async with (
        AsyncClient(running.grpc) as client,
        grpc.aio.insecure_channel(running.state["workers"][0]) as channel,
    ):
        expected = (await client.generate(PROMPT, **ANSWER)).token_ids
        before = running.state["roles"]["worker"]

        # A scheduler whose clock is ahead too, as after a wrong date on its machine.
        open_stream: Any = WorkerServiceStub(channel).Step
        stream = open_stream(metadata=credential)
        await stream.write(worker_pb2.StepRequest(epoch=time.time_ns() // 1000 + 9 * DAY, generation=1))
        assert (await stream.read()).HasField("ready")
        await until_set_apart(running, "is open")
        waiting = asyncio.create_task(client.generate(PROMPT, **ANSWER, request_id="meanwhile"))
        assert running.state["roles"]["worker"] == before, "a worker that runs steps does not restart"

        stream.cancel()
        await until_set_apart(running, "it restarts")
        async with asyncio.timeout(TIMEOUT):
            assert (await waiting).token_ids == expected
            while await why_set_apart(running) or running.state["roles"]["worker"]["state"] != "ready":
                await asyncio.sleep(0.05)
        after = running.state["roles"]["worker"]
        assert after["restarts"] == before["restarts"] + 1
        assert after["pid"] != before["pid"]
        others = {role: each["restarts"] for role, each in running.state["roles"].items() if role != "worker"}
        assert not any(others.values()), others
        assert (await client.generate(PROMPT, **ANSWER)).token_ids == expected
