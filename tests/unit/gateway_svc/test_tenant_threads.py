"""Threads shared by tenants, with work that ends when the test says so."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from gateway_svc.tenant_threads import TenantThreads


class Work:
    """Work that notes its start, and ends when it is released."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log
        self._release = threading.Event()

    def __call__(self) -> str:
        self._log.append(self.name)
        assert self._release.wait(60)
        return self.name

    def release(self) -> None:
        self._release.set()


@pytest.fixture
async def threads() -> AsyncIterator[TenantThreads]:
    threads = TenantThreads(3, "test")
    yield threads
    threads.close()


async def started(log: list[str], count: int) -> list[str]:
    """The names of work that has started, once there are so many."""
    async with asyncio.timeout(60):
        while len(log) < count:
            await asyncio.sleep(0.001)
    return log


async def test_a_tenant_leaves_a_thread_to_others_and_gets_no_turn_before_them(threads: TenantThreads) -> None:
    log: list[str] = []
    work = {name: Work(name, log) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")}
    tasks = {}
    for name, one in work.items():
        tasks[name] = asyncio.create_task(threads.run(name[0], one))
        await asyncio.sleep(0)
    assert sorted(await started(log, 3)) == ["a1", "a2", "b1"]
    for ended, next_one in (("b1", "b2"), ("a1", "a3"), ("a2", "c1"), ("c1", "a4")):
        work[ended].release()
        log.clear()
        assert await started(log, 1) == [next_one]
    for one in work.values():
        one.release()
    assert [await tasks[name] for name in work] == list(work)


async def test_a_cancelled_call_takes_no_thread(threads: TenantThreads) -> None:
    log: list[str] = []
    running = [Work("first", log), Work("second", log)]
    tasks = [asyncio.create_task(threads.run("a", one)) for one in running]
    await started(log, 2)
    waiting = asyncio.create_task(threads.run("a", Work("third", log)))
    await asyncio.sleep(0)
    for task in (waiting, tasks[0]):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    # The work of a cancelled call goes on, and keeps its thread until it ends.
    last = Work("last", log)
    last.release()
    task = asyncio.create_task(threads.run("a", last))
    await asyncio.sleep(0.01)
    assert log == ["first", "second"]
    running[0].release()
    assert await task == "last"
    running[1].release()
    assert await tasks[1] == "second"
    assert log == ["first", "second", "last"]


async def test_an_error_frees_its_thread(threads: TenantThreads) -> None:
    def fail() -> None:
        raise ValueError("bad")

    for _ in range(5):
        with pytest.raises(ValueError, match="bad"):
            await threads.run("a", fail)
