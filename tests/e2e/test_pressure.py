"""A deployment short of blocks, of room in its queue, and of speed in its swaps: what it tells, whom it refuses, and
that a worker which is killed in mid-swap costs no token."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployment import Deployment, deployment
from quire_client import AsyncClient, Generation, QuireError
from quire_client.admin import AdminClient
from reference import MAX_TIES, NEW_TOKENS, Reference

pytestmark = pytest.mark.timeout(300)

QUIRE = Path(sys.executable).parent / "quire"
NUM_BLOCKS = 24
BLOCK = 16
SWAPS = 'quire_preemptions_total{choice="swap"}'
MAX_QUEUED = 4  # requests of one tenant
PROMPT_BLOCKS = 10
LONG: dict[str, Any] = {"max_tokens": 220, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(model: object) -> Iterator[Deployment]:
    with deployment(
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        preemption="swap",
        swap_rate=4_000_000,  # bytes per second: five blocks
        max_tenant_queued_requests=MAX_QUEUED,
    ) as started:
        yield started


async def explain(running: Deployment, *arguments: str) -> Any:
    """What `quire explain` says, read as JSON."""
    admin = running.state["scheduler_admin"][0]
    call = await asyncio.create_subprocess_exec(QUIRE, "explain", *arguments, "--admin", admin, "--json", stdout=PIPE)
    said, _ = await call.communicate()
    assert call.returncode == 0
    return json.loads(said)


async def until_it_has_blocks(running: Deployment, name: str, count: int) -> None:
    """Wait until a request has so many blocks of the device."""
    with AdminClient(running.state["scheduler_admin"][0]) as admin:
        for _ in range(600):
            if admin.explain(name).sequences[0].num_device_blocks >= count:
                return
            await asyncio.sleep(0.01)
    raise AssertionError(f"{name} has fewer blocks")


async def until(running: Deployment, metric: str, value: float) -> None:
    """Wait for a metric of the scheduler."""
    for _ in range(600):
        if running.metrics()[metric] == value:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{metric} is not {value}\n{running.log.read_text()[-4000:]}")


@asynccontextmanager
async def contended(running: Deployment, num_queued: int) -> AsyncIterator[AsyncClient]:
    """Two requests that run until they do not fit beside each other and the second gives way; others queue."""
    names = ["runs", "gives way", *(f"queues {i}" for i in range(num_queued))]
    names = [name.replace(" ", "-") for name in names]
    async with AsyncClient(running.grpc) as client:
        tasks = []
        for place, name in enumerate(names):
            prompt = [1000 + place] * (PROMPT_BLOCKS * BLOCK)
            tasks.append(asyncio.create_task(client.generate(prompt, request_id=name, **LONG)))
            if place < 2:
                await until(running, "quire_requests_running", place + 1)
        await until(running, "quire_requests_swapped", 1)
        await until(running, "quire_requests_waiting", 1 + num_queued)
        yield client
        for name in names:
            await client.cancel(name)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, Generation | QuireError) for end in ends)
    await running.rest()


async def test_explain_tells_who_runs_who_gave_way_and_who_waits(running: Deployment) -> None:
    async with contended(running, num_queued=1):
        names = ("runs", "gives-way", "queues-0")
        await until_it_has_blocks(running, "runs", NUM_BLOCKS - PROMPT_BLOCKS)
        told = await asyncio.gather(*(explain(running, name) for name in names), explain(running))
    runs, gives_way, queues = (one["sequences"][0] for one in told[:3])
    assert runs["state"] == "running"
    assert runs["num_device_blocks"] > PROMPT_BLOCKS
    assert (runs["num_host_blocks"], runs["num_missing_blocks"], runs["num_preemptions"]) == (0, 0, 0)
    assert runs["num_ahead"] is None
    assert gives_way["state"] == "swapped"
    assert gives_way["num_host_blocks"] > PROMPT_BLOCKS
    assert gives_way["num_device_blocks"] == 0
    assert gives_way["num_missing_blocks"] > 0
    assert gives_way["num_preemptions"] == 1
    assert gives_way["last_preemption"]["choice"] == "swap"
    assert min(gives_way["last_preemption"][f"{way}_seconds"] for way in ("swap", "recompute")) > 0
    assert queues["state"] == "queued"
    assert (queues["num_device_blocks"], queues["num_host_blocks"], queues["num_generated_tokens"]) == (0, 0, 0)
    assert queues["num_ahead"] == 1, "who gave way comes back first"
    assert queues["predicted_start"] is not None
    assert {one["tenant"] for one in told[:3]} == {"default"}
    assert told[2]["num_waiting"] == 1
    listed = told[3]
    assert listed["num_live"] == 3
    assert [one["state"] for one in listed["requests"]] == ["running", "swapped", "queued"]
    assert [one["key"] for one in listed["requests"]] == [one["key"] for one in told[:3]]


async def test_deadline_that_cannot_be_met_is_refused_at_once(running: Deployment) -> None:
    async with contended(running, num_queued=3) as client:
        with pytest.raises(QuireError) as refused:
            await client.generate([7, 8, 9], max_tokens=4, timeout=1.5)
        async with httpx.AsyncClient(base_url=running.http) as http:
            body = {"prompt": [7, 8, 9], "max_tokens": 4}
            answer = await http.post("/v1/completions", json=body, headers={"x-request-timeout": "1.5"})
    assert (refused.value.code.name, refused.value.reason) == ("UNAVAILABLE", "DEADLINE_TOO_SHORT")
    assert refused.value.retry_after is not None
    assert refused.value.retry_after >= 1
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deadline_too_short")
    assert int(answer.headers["retry-after"]) >= 1


async def test_tenant_with_as_many_requests_in_the_queue_as_it_may_have_is_refused(running: Deployment) -> None:
    async with contended(running, num_queued=MAX_QUEUED) as client:
        with pytest.raises(QuireError) as refused:
            await client.generate([7, 8, 9], max_tokens=4)
        async with httpx.AsyncClient(base_url=running.http) as http:
            answer = await http.post("/v1/completions", json={"prompt": [7, 8, 9], "max_tokens": 4})
    assert (refused.value.code.name, refused.value.reason) == ("RESOURCE_EXHAUSTED", "TENANT_QUOTA_EXCEEDED")
    assert refused.value.retry_after is not None
    assert refused.value.retry_after >= 1
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "tenant_quota_exceeded")
    assert int(answer.headers["retry-after"]) >= 1


async def in_mid_swap(running: Deployment) -> None:
    """Wait until blocks of a sequence that gave way are being copied."""
    while True:
        before = running.metrics()[SWAPS]
        while running.metrics()[SWAPS] == before:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.15)  # the step that was running is done by then
        if running.blocks()["in_flight"]:
            return


async def test_worker_that_is_killed_in_mid_swap_costs_no_token(running: Deployment, judged: list[Reference]) -> None:
    async def serve(client: AsyncClient, reference: Reference) -> list[int]:
        tokens: list[int] = []
        async for chunk in client.stream(reference.prompt, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True):
            assert chunk.offset == len(tokens)
            tokens += chunk.token_ids
        return tokens

    chosen = judged[14:20]  # of 33 to 64 tokens
    async with AsyncClient(running.grpc) as client:
        serving = [asyncio.create_task(serve(client, reference)) for reference in chosen[:MAX_QUEUED]]
        await until(running, "quire_requests_running", MAX_QUEUED)
        serving += [asyncio.create_task(serve(client, reference)) for reference in chosen[MAX_QUEUED:]]
        await in_mid_swap(running)
        running.kill("worker")
        served = await asyncio.gather(*serving)
    assert sum(reference.judge(tokens) for reference, tokens in zip(chosen, served, strict=True)) <= MAX_TIES
    assert running.state["roles"]["worker"]["restarts"] == 1
    blocks = await running.rest()
    assert blocks["free"] + blocks["cached"] == NUM_BLOCKS
