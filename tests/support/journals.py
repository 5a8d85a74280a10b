"""Journals with a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis

from redis_server import RedisServer
from scheduler_svc.core.budgets import Budgets
from scheduler_svc.journal import Journal
from scheduler_svc.request_log import RequestLog
from scheduler_svc.spending import Spending
from scheduler_svc.store.redis import RedisStore

EPOCH = 100


class JournalCallbacks:
    """Records the callbacks of a journal."""

    def __init__(self) -> None:
        self.durable: list[tuple[RequestLog, int]] = []
        self.num_stale = 0

    def on_durable(self, log: RequestLog, index: int) -> None:
        self.durable.append((log, index))

    def on_stale(self) -> None:
        self.num_stale += 1


@asynccontextmanager
async def store_at(server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(server.url, 500)
    try:
        yield store
    finally:
        await store.close()


def journal_of(store: RedisStore, callbacks: JournalCallbacks) -> Journal:
    return Journal(store, EPOCH, callbacks.on_stale, callbacks.on_durable, Spending(Budgets()))


@asynccontextmanager
async def at_work(journal: Journal) -> AsyncIterator[None]:
    task = asyncio.create_task(journal.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def contents(keys: "redis.Redis") -> dict[bytes, bytes]:
    """All that a server has, by key."""
    return {name: value for name in keys.scan_iter() if (value := keys.dump(name)) is not None}


def fail_over(keys: "redis.Redis", earlier: dict[bytes, bytes]) -> None:
    """As where the primary of a Redis fails and its replica has no more than the `earlier` contents."""
    keys.flushall()
    for name, value in earlier.items():
        keys.restore(name, 500_000, value)
    keys.script_flush()


async def read(store: RedisStore, log: RequestLog) -> RequestLog:
    found = await store.read(log.key)
    assert found is not None
    return found


async def whole(journal: Journal, *logs: RequestLog) -> None:
    """Wait until the store has everything."""
    async with asyncio.timeout(60):
        while journal.lag or not all(log.is_durable for log in logs):
            await asyncio.sleep(0.005)
