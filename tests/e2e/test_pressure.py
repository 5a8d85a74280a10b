"""A deployment with few blocks, a short queue and slow swaps: its metrics, its rejections, and a worker that is killed
in the middle of a swap, which loses no token."""

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployment import Deployment, deployment
from quire_client import AsyncClient, Generation, QuireError
from quire_client.admin import SequenceState
from reference import MAX_TIES, NEW_TOKENS, Reference
from scheduler_svc.core.request import STOP_STRING_LEAD

QUIRE = Path(sys.executable).parent / "quire"
NUM_BLOCKS = 16  # so few that tokens of two requests fill them in seconds, also on a slow machine
BLOCK = 16
SWAPS = 'quire_preemptions_total{method="swap"}'
MAX_QUEUED = 4  # requests of one tenant
PROMPT_BLOCKS = 4
LONG: dict[str, Any] = {"max_tokens": 182, "temperature": 0, "ignore_eos": True, "stop": "there is no such text"}


@pytest.fixture(scope="module")
def running(shallow_model: object) -> Iterator[Deployment]:
    with deployment(
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        preemption="swap",
        swap_rate=800_000,  # bytes per second: five blocks
        max_tenant_queued_requests=MAX_QUEUED,
        gateways=2,
    ) as started:
        yield started


def explained(running: Deployment, name: str) -> Any:
    """The state of a request."""
    with running.admin() as admin:
        return asdict(admin.explain(name))


async def listed_by_command(running: Deployment) -> Any:
    """The output of `quire explain`, parsed as JSON."""
    admin = running.state["scheduler_admin"][0]
    environment = os.environ | {"QUIRE_DEPLOYMENT_SECRET_FILE": str(running.secret_file)}
    call = await asyncio.create_subprocess_exec(
        QUIRE, "explain", "--admin", admin, "--json", stdout=PIPE, env=environment
    )
    said, _ = await call.communicate()
    assert call.returncode == 0
    return json.loads(said)


async def until_paused(running: Deployment, name: str) -> None:
    """Waits until a request is paused because its gateway is too far behind."""
    with running.admin() as admin:
        async with asyncio.timeout(120):
            while admin.explain(name).sequences[0].state is not SequenceState.PAUSED:
                await asyncio.sleep(0.02)


async def until(running: Deployment, metrics: Sequence[str], value: float) -> None:
    """Waits until metrics of the scheduler have this sum."""
    end = time.monotonic() + 120
    while True:
        samples = running.metrics()
        if sum(samples[metric] for metric in metrics) == value:
            return
        assert time.monotonic() < end, f"{metrics} are not {value}\n{running.log.read_text()[-4000:]}"
        await asyncio.sleep(0.02)


def other_http(running: Deployment) -> str:
    """Base URL of the gateway that `contended` does not stop."""
    return f"http://{running.state['http'][1]}"


def names_of_contended(num_queued: int) -> list[str]:
    """A name is used once: after its end a repeated request would be answered by its record."""
    return [f"{num_queued}-{name}" for name in ("runs", "preempted", *(f"queues-{i}" for i in range(num_queued)))]


@asynccontextmanager
async def contended(running: Deployment, num_queued: int) -> AsyncIterator[AsyncClient]:
    """One request holds its blocks, a second one is preempted when it needs more than the others, and the rest queue.

    The gateway of the first is stopped (SIGSTOP). A sequence with stop strings pauses when it is too far ahead of its
    gateway, so the state does not change before the block ends, which must be before connections to a stopped process
    count as broken, after 30 s. Yields a client of the other gateway.
    """
    names = names_of_contended(num_queued)
    stopped, other = running.state["grpc"]
    async with AsyncClient(stopped) as client, AsyncClient(other) as asking:
        tasks: list[asyncio.Task[Generation]] = []

        def submit(name: str, through: AsyncClient, priority: int = 0) -> None:
            prompt = [1000 + len(tasks)] * (PROMPT_BLOCKS * BLOCK)
            call = through.generate(prompt, request_id=name, priority=priority, **LONG)
            tasks.append(asyncio.create_task(call))

        submit(names[0], client, priority=1)  # else it might be the one that gives up its blocks
        await until(running, ("quire_sequences_running",), 1)
        running.kill("gateway-0", signal.SIGSTOP)
        try:
            await until_paused(running, names[0])
            submit(names[1], asking)
            await until(running, ("quire_sequences_swapped",), 1)
            for count, name in enumerate(names[2:], start=2):
                submit(name, asking)
                await until(running, ("quire_sequences_waiting",), count)
            yield asking
        finally:
            running.kill("gateway-0", signal.SIGCONT)
        for name in names:
            await asking.cancel(name)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, Generation | QuireError) for end in ends)
    await running.rest()


async def test_explain_shows_which_request_runs_which_is_preempted_and_which_waits(running: Deployment) -> None:
    async with contended(running, num_queued=1):
        requests = [explained(running, name) for name in names_of_contended(1)]
        listed = await listed_by_command(running)
    runs, preempted, queues = (request["sequences"][0] for request in requests)
    assert runs["state"] == "paused"
    assert runs["num_device_blocks"] >= PROMPT_BLOCKS + STOP_STRING_LEAD // BLOCK
    assert (runs["num_host_blocks"], runs["num_missing_blocks"], runs["num_preemptions"]) == (0, 0, 0)
    assert runs["num_ahead"] is None
    assert preempted["state"] == "swapped"
    assert preempted["num_host_blocks"] > PROMPT_BLOCKS
    assert preempted["num_device_blocks"] == 0
    assert preempted["num_missing_blocks"] > 0
    assert preempted["num_preemptions"] == 1
    assert preempted["last_preemption"]["choice"] == "swap"
    assert min(preempted["last_preemption"][f"{way}_seconds"] for way in ("swap", "recompute")) > 0
    assert queues["state"] == "queued"
    assert (queues["num_device_blocks"], queues["num_host_blocks"], queues["num_generated_tokens"]) == (0, 0, 0)
    assert queues["num_ahead"] == 1, "the preempted request runs first"
    assert queues["predicted_start"] is not None
    assert {request["tenant"] for request in requests} == {"default"}
    assert requests[2]["num_waiting"] == 1
    assert listed["num_live"] == 3
    assert [one["state"] for one in listed["requests"]] == ["paused", "swapped", "queued"]
    assert [one["key"] for one in listed["requests"]] == [request["key"] for request in requests]


async def test_deadline_that_cannot_be_met_is_refused_at_once(running: Deployment) -> None:
    async with contended(running, num_queued=3) as client:
        last = explained(running, names_of_contended(3)[-1])
        timeout = last["sequences"][0]["predicted_start"] / 2  # longer on a slow machine
        with pytest.raises(QuireError) as refused:
            await client.generate([7, 8, 9], max_tokens=4, timeout=timeout)
        async with httpx.AsyncClient(base_url=other_http(running), timeout=60) as http:
            body = {"prompt": [7, 8, 9], "max_tokens": 4}
            answer = await http.post("/v1/completions", json=body, headers={"x-request-timeout": f"{timeout:.3f}"})
    assert (refused.value.code.name, refused.value.reason) == ("UNAVAILABLE", "DEADLINE_TOO_SHORT")
    assert refused.value.retry_after is not None
    assert refused.value.retry_after >= 1
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deadline_too_short")
    assert int(answer.headers["retry-after"]) >= 1


async def test_tenant_with_as_many_requests_in_the_queue_as_it_may_have_is_refused(running: Deployment) -> None:
    async with contended(running, num_queued=MAX_QUEUED) as client:
        with pytest.raises(QuireError) as refused:
            await client.generate([7, 8, 9], max_tokens=4)
        async with httpx.AsyncClient(base_url=other_http(running), timeout=60) as http:
            answer = await http.post("/v1/completions", json={"prompt": [7, 8, 9], "max_tokens": 4})
    assert (refused.value.code.name, refused.value.reason) == ("RESOURCE_EXHAUSTED", "TENANT_QUOTA_EXCEEDED")
    assert refused.value.retry_after is not None
    assert refused.value.retry_after >= 1
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "tenant_quota_exceeded")
    assert int(answer.headers["retry-after"]) >= 1


async def in_mid_swap(running: Deployment) -> None:
    """Waits until blocks of a preempted sequence are being copied."""
    while True:
        before = running.metrics()[SWAPS]
        while running.metrics()[SWAPS] == before:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.15)  # the running step is done by then
        if running.blocks()["copying"]:
            return


async def test_worker_that_is_killed_in_mid_swap_costs_no_token(
    running: Deployment, shallow_judged: list[Reference]
) -> None:
    served: list[tuple[Reference, list[int]]] = []
    is_killed = False

    async def serve(client: AsyncClient, reference: Reference) -> None:
        tokens: list[int] = []
        async for chunk in client.stream(reference.prompt, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True):
            assert chunk.offset == len(tokens)
            tokens += chunk.token_ids
        served.append((reference, tokens))

    async def serve_again_and_again(client: AsyncClient, reference: Reference) -> None:
        while not is_killed:
            try:
                await serve(client, reference)
            except QuireError as error:
                if error.reason != "TENANT_QUOTA_EXCEEDED":  # all others wait at this moment
                    raise

    chosen = shallow_judged[14 : 15 + MAX_QUEUED]  # of 33 to 64 tokens
    async with AsyncClient(running.state["grpc"][1]) as client:
        serving = [asyncio.create_task(serve_again_and_again(client, reference)) for reference in chosen]
        async with asyncio.timeout(300):
            await in_mid_swap(running)
        is_killed = True
        running.kill("worker")
        await asyncio.gather(*serving)
    assert served
    assert len({reference for reference, tokens in served if reference.judge(tokens)}) <= MAX_TIES
    assert running.state["roles"]["worker"]["restarts"] == 1
    blocks = await running.rest()
    assert blocks["free"] + blocks["cached"] == NUM_BLOCKS
