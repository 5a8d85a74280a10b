"""Elections on a real Redis."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import redis

from redis_server import RedisServer, running_server
from scheduler_svc.leadership import Fenced, Leadership
from scheduler_svc.store.base import StoreUnavailable
from scheduler_svc.store.redis import RedisStore

LONG, SHORT = 30.0, 0.2  # seconds of a lease that no test outlasts, and of one that runs out at once


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    store = RedisStore(server.url, 500)
    yield store
    await store.close()


async def leading(candidate: Leadership, *, standby: bool = False) -> int:
    async with asyncio.timeout(60):
        return await candidate.acquire(standby)


async def next_leader(store: RedisStore) -> str:
    """Waits until the store answers and a leader exists; returns the leader."""
    async with asyncio.timeout(60):
        while True:
            with suppress(StoreUnavailable):
                holder = await store.leader()
                if holder is not None:
                    return holder
            await asyncio.sleep(0.01)


async def test_a_scheduler_without_a_rival_leads_at_once(store: RedisStore) -> None:
    epoch = await leading(Leadership(store, "a", LONG))
    assert epoch > 0
    assert await store.leader() == "a"


async def test_a_standby_waits_while_another_one_leads_and_follows_it_at_once(store: RedisStore) -> None:
    first, second = Leadership(store, "a", LONG), Leadership(store, "b", LONG)
    epoch = await leading(first)
    waiting = asyncio.create_task(leading(second, standby=True))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await first.release()
    started = time.monotonic()
    assert await waiting > epoch
    assert time.monotonic() - started < LONG / 2


async def test_a_standby_leaves_a_vacancy_to_others_for_as_long_as_a_lease(store: RedisStore) -> None:
    standby = Leadership(store, "b", 1.0)
    started = time.monotonic()
    await leading(standby, standby=True)
    assert time.monotonic() - started >= 1.0


async def test_a_leader_that_dies_is_followed_when_its_lease_has_run_out(store: RedisStore) -> None:
    first = Leadership(store, "a", SHORT)
    epoch = await leading(first)
    assert await leading(Leadership(store, "b", SHORT), standby=True) > epoch


async def test_a_leader_keeps_its_lease(store: RedisStore) -> None:
    leader = Leadership(store, "a", SHORT)
    await leading(leader)
    keeping = asyncio.create_task(leader.keep())
    await store.release_lease("a")  # as where it ran out while the leader was held up
    assert await next_leader(store) == "a"
    assert not keeping.done()
    keeping.cancel()


async def test_a_leader_that_was_paused_is_fenced(store: RedisStore) -> None:
    paused = Leadership(store, "a", SHORT)
    await leading(paused)
    await leading(Leadership(store, "b", LONG))
    async with asyncio.timeout(60):
        with pytest.raises(Fenced):
            await paused.keep()
    with pytest.raises(Fenced):
        await paused.raise_epoch(paused.epoch + 5)
    await paused.release()
    assert await store.leader() == "b"


async def test_an_epoch_is_raised_above_what_a_worker_has_seen(store: RedisStore) -> None:
    leader = Leadership(store, "a", LONG)
    epoch = await leading(leader)
    assert await leader.raise_epoch(epoch + 10**9) == epoch + 10**9 + 1
    assert leader.epoch == epoch + 10**9 + 1
    assert await store.keep_lease("a", leader.epoch, LONG)


async def test_workers_that_report_side_by_side_raise_the_epoch_once(store: RedisStore) -> None:
    leader = Leadership(store, "a", LONG)
    above = await leading(leader) + 10**9
    raised = await asyncio.gather(*(leader.raise_epoch(above - number) for number in range(3)))
    assert raised == [above + 1] * 3
    assert await leader.raise_epoch(above) == above + 1


class Deaf(RedisStore):
    """A store whose first three answers to a leader that raises its epoch are lost."""

    def __init__(self, url: str) -> None:
        super().__init__(url, 500)
        self.num_lost = 0

    async def take_lease(self, holder: str, seconds: float, above: int = 0, epoch: int | None = None) -> int | None:
        taken = await super().take_lease(holder, seconds, above, epoch)
        if epoch is not None and self.num_lost < 3:
            self.num_lost += 1
            raise StoreUnavailable("the answer was lost")
        return taken


async def test_a_raised_epoch_whose_answer_was_lost_is_not_anothers(store: RedisStore, server: RedisServer) -> None:
    deaf = Deaf(server.url)
    leader = Leadership(deaf, "a", SHORT)
    above = await leading(leader) + 10**9
    keeping = asyncio.create_task(leader.keep())
    epoch = await leader.raise_epoch(above)
    assert epoch > above
    assert deaf.num_lost == 3
    await store.release_lease("a")
    assert await next_leader(store) == "a"  # renewed, with the new epoch
    assert not keeping.done()
    keeping.cancel()
    await deaf.close()


async def test_no_scheduler_begins_to_lead_without_a_store_and_a_leader_continues(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    store = RedisStore(server.url, 500)
    try:
        leader = Leadership(store, "a", SHORT)
        beginning = asyncio.create_task(leading(leader))
        await asyncio.sleep(0.3)
        assert not beginning.done()
        server.start()
        await beginning
        keeping = asyncio.create_task(leader.keep())
        server.kill()
        await asyncio.sleep(3 * SHORT)
        server.start()
        assert await next_leader(store) == "a"
        assert not keeping.done()
        keeping.cancel()
        server.kill()
        await leader.release()
    finally:
        server.kill()
        await store.close()


class CountingStore(RedisStore):
    """A store that counts its answers to who leads, and notes when it has named a leader."""

    def __init__(self, url: str) -> None:
        super().__init__(url, 500)
        self.is_leader_seen = asyncio.Event()
        self.num_leader_calls = 0

    async def leader(self, timeout: float | None = None) -> str | None:
        holder = await super().leader(timeout)
        self.num_leader_calls += 1
        if holder is not None:
            self.is_leader_seen.set()
        return holder


@asynccontextmanager
async def candidates(directory: Path) -> AsyncIterator[tuple[RedisServer, list[CountingStore]]]:
    """A server, and the stores of two candidates."""
    server = RedisServer(directory)
    server.start()
    stores = [CountingStore(server.url) for _ in range(2)]
    try:
        yield server, stores
    finally:
        server.kill()
        for store in stores:
            await store.close()


def restart_empty(server: RedisServer, directory: Path) -> None:
    """Restarts a server, which has lost everything."""
    server.kill()
    for kept in directory.rglob("*.aof*"):
        kept.unlink()
    server.start()


@pytest.mark.parametrize("standby", [False, True], ids=["started-as-leader", "started-as-standby"])
async def test_after_an_outage_the_former_leader_renews_its_lease_before_another_takes_it(
    tmp_path: Path, standby: bool
) -> None:
    """Else requests would be lost that the leader accepted meanwhile, without a record."""
    async with candidates(tmp_path) as (server, stores):
        leader, other = (Leadership(store, name, 12.0) for store, name in zip(stores, "ab", strict=True))
        await leading(leader)
        waiting = asyncio.create_task(leading(other, standby=standby))
        async with asyncio.timeout(60):
            await stores[1].is_leader_seen.wait()
            server.kill()
            while stores[1].is_answering:  # it has noticed
                await asyncio.sleep(0.01)
        restart_empty(server, tmp_path)
        async with asyncio.timeout(60):
            while not stores[1].is_answering:
                await asyncio.sleep(0.01)
        keeping = asyncio.create_task(leader.keep())  # it renews its lease after 3 s
        assert await next_leader(stores[0]) == "a"
        assert not keeping.done()
        assert not waiting.done()
        keeping.cancel()
        waiting.cancel()


async def test_a_lease_that_outlasts_an_outage_may_run_out_before_its_leader_renews_it(tmp_path: Path) -> None:
    async with candidates(tmp_path) as (server, stores):
        leader, other = (Leadership(store, name, 12.0) for store, name in zip(stores, "ab", strict=True))
        await leading(leader)
        waiting = asyncio.create_task(leading(other))
        async with asyncio.timeout(60):
            await stores[1].is_leader_seen.wait()
            server.kill()
            while stores[1].is_answering:
                await asyncio.sleep(0.01)
            stores[1].is_leader_seen.clear()
            server.start()
            await stores[1].is_leader_seen.wait()
        with redis.Redis.from_url(server.url) as client:
            client.delete("{quire}:lease")  # it runs out
        keeping = asyncio.create_task(leader.keep())
        assert await next_leader(stores[0]) == "a"
        keeping.cancel()
        waiting.cancel()


async def test_a_restart_that_no_call_noticed_does_not_end_a_leaders_term(tmp_path: Path) -> None:
    async with candidates(tmp_path) as (server, stores):
        leader, other = (Leadership(store, name, 12.0) for store, name in zip(stores, "ab", strict=True))
        await leading(leader)
        waiting = asyncio.create_task(leading(other))
        async with asyncio.timeout(60):
            await stores[1].is_leader_seen.wait()
        restart_empty(server, tmp_path)  # while the event loop stands still
        num_calls = stores[1].num_leader_calls
        async with asyncio.timeout(60):
            while stores[1].num_leader_calls < num_calls + 3:
                await asyncio.sleep(0.01)
        assert stores[1].is_answering
        assert not waiting.done()
        keeping = asyncio.create_task(leader.keep())
        assert await next_leader(stores[0]) == "a"
        keeping.cancel()
        waiting.cancel()


async def test_a_leader_that_dies_in_an_outage_is_followed_after_the_length_of_a_lease(tmp_path: Path) -> None:
    async with candidates(tmp_path) as (server, stores):
        leader, other = (Leadership(store, name, 1.5) for store, name in zip(stores, "ab", strict=True))
        epoch = await leading(leader)
        waiting = asyncio.create_task(leading(other))
        async with asyncio.timeout(60):
            await stores[1].is_leader_seen.wait()
        restart_empty(server, tmp_path)
        restarted = time.monotonic()
        assert await waiting > epoch
        assert time.monotonic() - restarted >= 1.5
