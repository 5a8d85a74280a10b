"""The end of a leader's term, on a real Redis."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import pytest

from environments import scheduler_environment
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from redis_server import RedisServer, running_server
from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.leader import Leader
from scheduler_svc.request_log import RequestLog
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.base import Gap, KeyTaken, WriteBatch
from scheduler_svc.store.redis import RedisStore
from scheduler_svc.term import PartFailed

FENCED_AT_THE_END = """
import asyncio
from scheduler_svc import __main__ as process
from scheduler_svc.leader import Leader

async def hand_over(self):
    self._term._is_fenced.set()  # as where a successor wrote before this one was done
    await asyncio.sleep(0.2)

Leader.hand_over = hand_over
process.main()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_server(tmp_path) as server:
        yield server


async def never_resigns(error: PartFailed) -> None:
    raise AssertionError("no part fails") from error


class Held(RedisStore):
    """A store whose list of live requests is held back until the test allows it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def live(self) -> list[RequestLog]:
        self.asked.set()
        await self.let.wait()
        return await super().live()


async def test_a_leader_that_hands_over_while_it_begins_does_not_begin(server: RedisServer) -> None:
    store, opened = Held(server.url), asyncio.Event()

    async def on_lead(_: SchedulerEngine) -> None:
        opened.set()

    settings = SchedulerSettings.model_validate({"redis_url": server.url, "workers_at": "127.0.0.1:1"})
    leader = Leader(settings, store, "a", on_lead, never_resigns)
    running = asyncio.create_task(leader.run())
    async with asyncio.timeout(60):
        await store.asked.wait()
    await leader.hand_over()
    assert await store.leader() is None
    store.let.set()
    await asyncio.sleep(0.2)
    assert not opened.is_set()
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])
    await store.close()


async def test_a_fence_that_comes_while_the_process_ends_does_not_kill_it(server: RedisServer) -> None:
    environment = scheduler_environment(server.url, "127.0.0.1:1")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FENCED_AT_THE_END, env=environment, stderr=PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while b"requests taken over" not in await process.stderr.readline():
                pass
            process.send_signal(signal.SIGTERM)
            await process.stderr.read()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()


class Failing(RedisStore):
    """A store with a defect, until the test mends it."""

    def __init__(self, url: str, *, live: bool = False, write: bool = False) -> None:
        super().__init__(url)
        self.fails_live, self.fails_write = live, write

    async def live(self) -> list[RequestLog]:
        if self.fails_live:
            raise RuntimeError("a defect")
        return await super().live()

    async def write(self, batch: WriteBatch, epoch: int) -> list[Gap | KeyTaken]:
        if self.fails_write:
            raise RuntimeError("a defect")
        return await super().write(batch, epoch)


@pytest.mark.parametrize("part", ["takeover", "journal"])
async def test_a_term_whose_part_fails_ends_and_the_next_one_goes_on(
    part: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.leader._MIN_PAUSE", 0.01)
    store = Failing(server.url, live=part == "takeover", write=part == "journal")
    opened: asyncio.Queue[SchedulerEngine] = asyncio.Queue()
    resigned: asyncio.Queue[PartFailed] = asyncio.Queue()
    settings = SchedulerSettings.model_validate({"redis_url": server.url, "workers_at": "127.0.0.1:1"})
    leader = Leader(settings, store, "a", opened.put, resigned.put)
    running = asyncio.create_task(leader.run())
    submit = scheduler_v1.Submit(key="k", submission_id="k", prompt_token_ids=[5], n=1, max_tokens=1, detachable=True)
    async with asyncio.timeout(60):
        if part == "journal":
            (await opened.get()).journal.mark_changed(RequestLog(submit, accepted_at=1.0))
        first, second = await resigned.get(), None
        if part == "takeover":
            second = await resigned.get()
        store.fails_live = store.fails_write = False
        engine = await opened.get()
        assert first.part == part
        assert second is None or second.part == part
        engine.journal.mark_changed(RequestLog(submit, accepted_at=1.0))
        while await store.read("k") is None:
            await asyncio.sleep(0.01)
    await leader.hand_over()
    assert await store.leader() is None
    running.cancel()
    await asyncio.wait([running])
    await store.close()
