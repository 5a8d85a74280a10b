"""A model's dtype and weights, or the library that computes it, are replaced under load: old and new workers side by
side, and no request fails."""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from large import large_but
from quire_client import AsyncClient
from svc_common.supervisor.roles import Role
from svc_common.supervisor.runner import RestartPolicy
from tests.chaos.stack import Stack, stack

TIMEOUT = 240  # seconds
NUM_CLIENTS = 4
NUM_TOKENS = 400
# A worker with the settings that a file has when it starts, as a pod has the template that its workload has by then.
_RUN = """
import json, os, runpy, sys
with open(sys.argv.pop(1)) as file:
    os.environ.update(json.load(file))
if version := os.environ.pop("LIBRARY_VERSION", None):
    from other_library import pretend
    pretend(version)
runpy.run_module("worker_svc", run_name="__main__", alter_sys=True)
"""


@asynccontextmanager
async def deployment(log: Path, model: Path, settings: Path) -> AsyncIterator[Stack]:
    def adapt(role: Role) -> Role:
        if not role.name.startswith("worker-"):
            return role
        path = os.pathsep.join(one for one in sys.path if one)
        command = (sys.executable, "-c", _RUN, str(settings))
        return replace(role, command=command, environment={**role.environment, "PYTHONPATH": path})

    environment = {"QUIRE_NUM_BLOCKS": "400", "QUIRE_DRAIN_GRACE": "120", "QUIRE_DETERMINISTIC": "1"}
    environment |= {"QUIRE_MODEL": str(model), "QUIRE_SERVED_MODEL_NAME": "tiny"}
    counts = {"gateways": 1, "schedulers": 2, "workers": 2}
    async with stack(log, environment, counts, RestartPolicy(max_backoff=0.0), adapt) as running:
        await settled(running, 0)
        yield running


async def settled(running: Stack, num_restarts: int) -> None:
    """Waits until there were so many restarts, every role is ready, and both workers are in use."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            leader = await running.leader() if running.is_ready() else None
            num_ready = (await running.metrics(leader)).get("quire_workers_ready") if leader is not None else None
            if num_ready == 2 and running.num_restarts() >= num_restarts:
                return
            await asyncio.sleep(0.1)


async def generated(client: AsyncClient, number: int) -> tuple[int, ...]:
    prompt = [50 + number, *range(60, 100)]
    stream = client.stream(prompt, max_tokens=NUM_TOKENS, temperature=1, seed=number, ignore_eos=True)
    return tuple((await stream.collect()).token_ids)


def trained_further(model: Path, to: Path) -> Path:
    """A copy of a model of which one tensor is a little different."""
    shutil.copytree(model, to)
    weights = load_file(to / "model.safetensors")
    weights["model.norm.weight"] *= 1.1
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("change", large_but(["dtype and weights", "library"], "dtype and weights"))
async def test_each_request_gets_all_its_tokens_from_the_version_it_began_with(
    tiny_model: Path, tmp_path: Path, change: str
) -> None:
    settings = tmp_path / "settings.json"
    old = {"QUIRE_DTYPE": "float32", "QUIRE_MODEL": str(tiny_model)}
    if change == "library":
        new = {"LIBRARY_VERSION": "99.0.0"}
    else:
        new = {"QUIRE_DTYPE": "bfloat16", "QUIRE_MODEL": str(trained_further(tiny_model, tmp_path / "trained"))}
    settings.write_text(json.dumps(old))
    log = tmp_path / "log"
    async with deployment(log, tiny_model, settings) as running:
        async with AsyncClient(running.addresses.grpc[0].dial_address) as client:
            numbers = range(NUM_CLIENTS)
            of_old = await asyncio.gather(*(generated(client, number) for number in numbers))
            is_done = asyncio.Event()

            async def ask(number: int) -> list[tuple[int, ...]]:
                answers = []
                while not is_done.is_set():
                    answers.append(await generated(client, number))
                return answers

            asking = [asyncio.create_task(ask(number)) for number in numbers]
            settings.write_text(json.dumps(old | new))
            running.send("worker-0", signal.SIGTERM)
            await settled(running, 1)
            # The leader is replaced while the last old worker drains, as where all services are upgraded at once.
            leader = await running.leader()
            assert leader is not None
            running.send("worker-1", signal.SIGTERM)
            async with asyncio.timeout(TIMEOUT):
                while not re.search(r"worker-1 +info +draining", log.read_text()):
                    await asyncio.sleep(0.01)
            running.send(leader, signal.SIGTERM)
            await settled(running, 3)
            is_done.set()
            answers = await asyncio.gather(*asking)
            of_new = await asyncio.gather(*(generated(client, number) for number in numbers))
        assert of_old != of_new, "the versions cannot be distinguished"
        for number, got in zip(numbers, answers, strict=True):
            assert set(got) <= {of_old[number], of_new[number]}
        assert running.num_restarts() == 3
