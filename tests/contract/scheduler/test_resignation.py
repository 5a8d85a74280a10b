"""A leader that cannot serve resigns; its requests continue with the next leader.

What fails is a policy of another package, as an operator may install it: while a file exists, it raises where it is
asked for the next sequence. Where another file exists, it removes that and raises where it charges tokens.
"""

import asyncio
import os
from pathlib import Path

import grpc
import pytest

from environments import service_environment
from quire.admin.v1 import admin_pb2 as admin_v1
from quire.admin.v1.admin_pb2_grpc import AdminServiceStub
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_harness import TIMEOUT, SessionClient, Worker, expected, until_recorded
from scheduler_process import NOT_SERVING, SERVICE, SERVING, SchedulerProcess, scheduler_process
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore

_SOURCE = """
import os
from scheduler_svc.core.policy import FcfsPolicy

class BreakablePolicy(FcfsPolicy):
    def first(self, now):
        if os.path.exists(os.environ["BREAKS_WHILE"]):
            raise RuntimeError("a defect of the policy")
        return super().first(now)

    def charge(self, sequence, num_tokens):
        if os.path.exists(os.environ["BREAKS_ONCE"]):
            os.unlink(os.environ["BREAKS_ONCE"])
            raise RuntimeError("a defect of the policy")
"""


class Plugin:
    """An installed package with the policy `breakable`. `variables` are those of a scheduler that uses it."""

    def __init__(self, directory: Path) -> None:
        info = directory / "breakable-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: breakable\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[quire.policies]\nbreakable = breakable:BreakablePolicy\n")
        (directory / "breakable.py").write_text(_SOURCE)
        self.breaks_while = directory / "is-broken"
        self.breaks_once = directory / "breaks-once"
        self.variables = {
            "PYTHONPATH": os.pathsep.join([service_environment()["PYTHONPATH"], str(directory)]),
            "QUIRE_POLICY": "breakable",
            "BREAKS_WHILE": str(self.breaks_while),
            "BREAKS_ONCE": str(self.breaks_once),
        }


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


async def until_resigned(process: SchedulerProcess, times: int) -> None:
    async with asyncio.timeout(TIMEOUT):
        while len(process.logged("resigned")) < times:
            await asyncio.sleep(0.02)


async def streaming(session: SessionClient, *, detachable: bool = True) -> scheduler_v1.Submit:
    """Submits a request of 200 tokens, and waits for some of them."""
    await session.ready()
    submit = await session.submit(max_tokens=200, detachable=detachable)
    await session.until_tokens(submit.key, 20)
    return submit


async def test_a_leader_that_cannot_plan_resigns_and_a_standby_takes_over(
    redis_url: str, worker: Worker, plugin: Plugin
) -> None:
    async with (
        scheduler_process(redis_url, worker.port, **plugin.variables) as first,
        scheduler_process(redis_url, worker.port, QUIRE_STANDBY="1") as second,
    ):
        await first.until(SERVICE, SERVING)
        await second.until(SERVICE, NOT_SERVING)
        async with first.session() as session:
            submit = await streaming(session, detachable=False)
            plugin.breaks_while.touch()
            async with asyncio.timeout(TIMEOUT):  # a leader that goes on sends messages for ever
                assert await session.end() is grpc.StatusCode.UNAVAILABLE
            held = session.tokens(submit.key)
        await first.until(SERVICE, NOT_SERVING)
        await second.until(SERVICE, SERVING)
        async with second.session() as session:
            answer = await session.attach(submit.key)
            assert list(answer.attached.sequences[0].token_ids)[: len(held)] == held
            assert await session.until_tokens(submit.key, 200) == expected(200)

        metrics = await first.metrics()
        assert metrics["quire_leader"] == 0
        assert metrics['quire_resignations_total{error="RuntimeError",part="steps"}'] == 1
        async with grpc.aio.insecure_channel(f"127.0.0.1:{first.ports['admin_port']}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await AdminServiceStub(channel).ListRequests(admin_v1.ListRequestsRequest())
        why = "steps: RuntimeError: a defect of the policy"
        assert f"it resigned: {why}" in str(refusal.value.details())
        health = await first.health()
        assert (health["status"], health["resigned"]) == ("NOT_SERVING", why)
        assert (await second.health())["resigned"] is None
        assert first.process.returncode is None


async def test_a_commit_that_fails_once_ends_the_term_and_costs_no_token(
    redis_url: str, worker: Worker, plugin: Plugin, store: RedisStore
) -> None:
    async with scheduler_process(redis_url, worker.port, **plugin.variables) as only:
        await only.until(SERVICE, SERVING)
        async with only.session() as session:
            submit = await streaming(session)
            plugin.breaks_once.touch()
            async with asyncio.timeout(TIMEOUT):
                assert await session.end() is grpc.StatusCode.UNAVAILABLE
            held = session.tokens(submit.key)
        assert held == expected(200)[: len(held)]
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].token_ids == expected(200)
        metrics = await only.metrics()
        assert metrics['quire_resignations_total{error="RuntimeError",part="steps"}'] == 1


async def test_a_defect_of_every_leader_costs_no_request_and_is_met_ever_more_rarely(
    redis_url: str, worker: Worker, plugin: Plugin, store: RedisStore
) -> None:
    async with scheduler_process(redis_url, worker.port, **plugin.variables) as only:
        await only.until(SERVICE, SERVING)
        async with only.session() as session:
            submit = await streaming(session)
            plugin.breaks_while.touch()
            await until_resigned(only, 2)
        assert [entry["pause"] for entry in only.logged("resigned")] == [1, 2]
        epochs = [entry["epoch"] for entry in only.logged("leading")]
        assert epochs == sorted(set(epochs))
        log = await store.read(submit.key)
        assert log is not None
        assert log.state is State.ACCEPTED
        plugin.breaks_while.unlink()
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].token_ids == expected(200)
        await only.until(SERVICE, SERVING)
        only.process.terminate()
        assert await only.ended() == 0
