"""Roles of the previous release and of this one together, during an upgrade and a rollback."""

import asyncio
import functools
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from quire_client import AsyncClient, AsyncStream
from svc_common.supervisor.roles import Role
from svc_common.supervisor.runner import RestartPolicy
from tests.chaos.stack import Stack, stack

BEFORE = "7d18df7fd0bf9b3cb0c9ae5eee1f34d5867ccf21"
"""The last commit of protocol 1 on both streams."""

ROOT = Path(__file__).parents[2]
TIMEOUT = 120  # seconds
NUM_TOKENS = 400  # of a stream, which take about a second
_RUN = """
import runpy, sys
tree, module = sys.argv[1:3]
sys.path[:0] = [tree, *(f"{tree}/{part}" for part in ("protos", "kernels", "client"))]
sys.argv[:] = [module]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree of the previous release."""
    tree = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True)
    if archive.returncode:
        pytest.skip(f"the history does not reach back to {BEFORE[:7]}")
    subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
    return tree


@asynccontextmanager
async def mixed(before: Path, model: Path, log: Path) -> AsyncIterator[Stack]:
    """Two of each role, the first of the previous release."""

    def adapt(role: Role) -> Role:
        # The previous release proves no role, and checks none.
        role = replace(role, environment={**role.environment, "QUIRE_INSECURE": "1"})
        if not role.name.endswith("-0"):
            return role
        module = role.command[role.command.index("-m") + 1]
        return replace(role, command=(sys.executable, "-c", _RUN, str(before), module))

    environment = {"QUIRE_MODEL": str(model), "QUIRE_DTYPE": "float32", "QUIRE_NUM_BLOCKS": "400"}
    counts = {"gateways": 2, "schedulers": 2, "workers": 2}
    async with stack(log, environment, counts, RestartPolicy(max_backoff=0.0), adapt) as running:
        await settled(running)
        yield running


async def settled(running: Stack) -> str:
    """Waits until every role is ready and both workers are in use; returns the leader."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            leader = await running.leader() if running.is_ready() else None
            if leader is not None and (await running.metrics(leader)).get("quire_workers_ready") == 2:
                return leader
            await asyncio.sleep(0.1)


async def kill(running: Stack, name: str) -> None:
    running.send(name, signal.SIGKILL)


async def replace_leader(running: Stack, leader: str) -> None:
    """Kills the leader when another scheduler leads; otherwise it could restart and take the lease itself."""
    running.send(leader, signal.SIGSTOP)
    while await running.leader() is None:
        await asyncio.sleep(0.1)
    running.send(leader, signal.SIGKILL)


def prompt(number: int) -> list[int]:
    return [50 + number, *range(60, 100)]


def streamed(client: AsyncClient, number: int, name: str) -> AsyncStream:
    return client.stream(prompt(number), max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, request_id=name)


async def test_streams_go_on_while_roles_of_two_releases_take_over_from_each_other(
    before: Path, tiny_model: Path, tmp_path: Path
) -> None:
    async with mixed(before, tiny_model, tmp_path / "log") as running, AsyncExitStack() as entered:
        addresses = [address.dial_address for address in running.addresses.grpc]
        orders = (addresses, addresses[::-1])  # the order of preference of each client
        clients = [await entered.enter_async_context(AsyncClient(",".join(order))) for order in orders]
        quiet = [streamed(clients[number % 2], number, f"quiet-{number}") for number in range(4)]
        expected = [list(answer.token_ids) for answer in await asyncio.gather(*(stream.collect() for stream in quiet))]
        num_steps = "quire_worker_steps_total"
        assert all([(await running.metrics(worker))[num_steps] for worker in running.instances("worker")])

        async def check(number: int, name: str, half_way: asyncio.Event) -> None:
            tokens: list[int] = []
            async for chunk in streamed(clients[number % 2], number, name):
                tokens += chunk.token_ids
                if len(tokens) > 20:
                    half_way.set()
            assert tokens == expected[number]

        async def survive(name: str, fault: Callable[[], Awaitable[None]]) -> None:
            half_ways = [asyncio.Event() for _ in expected]
            checks = [
                asyncio.create_task(check(number, f"{name}-{number}", half_way))
                for number, half_way in enumerate(half_ways)
            ]
            async with asyncio.timeout(TIMEOUT):
                await asyncio.gather(*(half_way.wait() for half_way in half_ways))
                await fault()
                await asyncio.gather(*checks)

        first = await settled(running)
        await survive("takeover", lambda: replace_leader(running, first))
        second = await settled(running)
        assert second != first
        await survive("rollback", lambda: replace_leader(running, second))
        assert await settled(running) == first
        for victim in ("gateway-0", "gateway-1", "worker-0", "worker-1"):
            await survive(victim, functools.partial(kill, running, victim))
            await settled(running)
