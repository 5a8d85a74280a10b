"""The store in a Redis with sentinels, and in a cluster: requests go on when the primary dies."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from certificates import Authority
from large import large_but
from ports import LOOPBACK
from redis_fleets import (
    LOCALHOST,
    PASSWORD,
    SERVICE,
    RedisFleet,
    ServerTls,
    cluster_fleet,
    sentinel_fleet,
    until,
)
from scheduler_harness import TIMEOUT, Deployment, SessionClient, Worker, expected, scheduler, until_recorded
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.base import StoreUnavailable
from scheduler_svc.store.redis import RedisStore
from scheduler_svc.store.scripts import SCRIPT
from svc_common.redis_tls import NO_FILES, RedisTlsFiles
from svc_common.redis_url import RedisTarget


@dataclass(frozen=True)
class Deployed:
    """Servers, and the settings of a scheduler that uses them."""

    fleet: RedisFleet
    files: RedisTlsFiles

    @asynccontextmanager
    async def store(self) -> AsyncIterator[RedisStore]:
        store = RedisStore(self.fleet.url, 600, tls=self.files)
        yield store
        await store.close()

    def scheduler(self, worker: Worker) -> AbstractAsyncContextManager[Deployment]:
        files = self.files
        settings = {"redis_ca_file": files.ca, "redis_cert_file": files.certificate, "redis_key_file": files.key}
        return scheduler(self.fleet.url, [worker.port], **settings)


@pytest.fixture(
    params=large_but(["sentinel", "cluster", "sentinel with TLS", "cluster with TLS"], "sentinel", "cluster with TLS")
)
def deployed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployed]:
    """Servers for the test, because one is killed."""
    tls, files = None, NO_FILES
    if request.param.endswith("with TLS"):
        authority = Authority(tmp_path / "ca")
        own = authority.issue("scheduler", LOCALHOST)
        tls = ServerTls(authority.certificate, authority.issue("redis", LOCALHOST), own)
        files = RedisTlsFiles(authority.certificate, own.certificate, own.key)
    is_cluster = request.param.startswith("cluster")
    with cluster_fleet(tmp_path, "{quire}:lease", tls) if is_cluster else sentinel_fleet(tmp_path, tls) as fleet:
        yield Deployed(fleet, files)


async def record_in(store: RedisStore, key: str) -> RequestLog:
    """The record of a request that has ended, once there is a primary that has it."""
    async with asyncio.timeout(2 * TIMEOUT):
        while True:
            try:
                return await until_recorded(store, key, State.FINISHED)
            except StoreUnavailable:
                await asyncio.sleep(0.1)


async def until_durable(session: SessionClient) -> None:
    """Waits until the leader records requests."""
    async with asyncio.timeout(2 * TIMEOUT):
        while session.status is None or session.status.is_store_degraded:
            await session.read()


async def test_requests_go_on_and_are_recorded_when_the_primary_dies(deployed: Deployed, worker: Worker) -> None:
    async with (
        deployed.store() as store,
        deployed.scheduler(worker) as running,
        running.session() as session,
    ):
        await session.ready()
        before = await session.submit()
        assert (await session.answer(before.command_id)).accepted.is_durable
        assert (await record_in(store, before.key)).sequences[0].token_ids == expected(8)
        submit = await session.submit(max_tokens=200)
        await session.until_tokens(submit.key, 5)
        num_restarts = running.store.num_restarts
        deployed.fleet.kill_primary()
        assert await session.until_tokens(submit.key, 200) == expected(200)
        epoch = running.engine.epoch
        late = await session.submit(max_tokens=20)
        assert await session.until_tokens(late.key, 20) == expected(20)
        for key, count in ((submit.key, 200), (late.key, 20), (before.key, 8)):
            assert (await record_in(store, key)).sequences[0].token_ids == expected(count)
        await until_durable(session)
        assert running.store.num_restarts > num_restarts  # what the new primary may lack is written again
        assert await store.eviction_policy() == "noeviction"
        last = await session.submit()
        assert (await session.answer(last.command_id)).accepted.is_durable
        assert running.engine.epoch == epoch
        assert set(session.epochs) == {epoch}


async def test_a_store_that_is_closed_after_a_failure_has_no_connection_left(deployed: Deployed) -> None:
    async with deployed.store() as store:
        assert await store.take_lease("a", 30) is not None
        deployed.fleet.kill_primary()
        with pytest.raises(StoreUnavailable):
            await store.leader()
    del store
    gc.collect()  # an open connection is reported then, and what is reported fails a test


async def test_records_that_the_former_primary_took_after_a_planned_failover_are_not_lost(
    tmp_path: Path, worker: Worker
) -> None:
    """It becomes a replica 8 s after the failover, or later: too late to write again what has ended before."""
    with sentinel_fleet(tmp_path) as fleet:
        async with scheduler(fleet.url, [worker.port]) as running, running.session() as session:
            await session.ready()
            first = await session.submit()
            await until_recorded(running.store, first.key, State.FINISHED)
            old, (host, sentinel) = fleet.find_primary(), RedisTarget.parse(fleet.url).addresses[0]
            with redis.Redis(host, sentinel) as client:
                client.execute_command("SENTINEL FAILOVER", SERVICE)
            await asyncio.to_thread(until, lambda: fleet.find_primary() != old)
            submit = await session.submit()
            assert await session.until_tokens(submit.key, 8) == expected(8)
            new = RedisStore(f"redis://:{PASSWORD}@{host}:{fleet.find_primary()}", 600)
            async with asyncio.timeout(TIMEOUT):
                while (log := await new.read(submit.key)) is None or log.state is not State.FINISHED:
                    later = await session.submit()  # what ended before it is soon not kept any more
                    await session.until_tokens(later.key, 8)
            assert log.sequences[0].token_ids == expected(8)
            await new.close()


async def test_a_store_notices_another_primary_that_has_been_one_before(tmp_path: Path) -> None:
    """It has the script, and the connections that its predecessor closed are replaced before their next use."""
    with sentinel_fleet(tmp_path) as fleet:
        store = RedisStore(fleet.url, 600)
        assert await store.take_lease("a", 30) is not None
        before, old = store.num_restarts, fleet.find_primary()
        host, sentinel = RedisTarget.parse(fleet.url).addresses[0]
        servers = {port: redis.Redis(host, port, password=PASSWORD) for port in fleet.processes}
        new = next(port for port in servers if port != old)
        servers[new].script_load(SCRIPT)
        with redis.Redis(host, sentinel) as client:
            client.execute_command("SENTINEL FAILOVER", SERVICE)
        await asyncio.to_thread(until, lambda: fleet.find_primary() == new)
        servers[old].client_kill_filter(_type="normal", skipme=True)  # as sentinels do when they make it a replica
        await asyncio.sleep(0.2)  # the event loop finds that the connection is closed
        assert await store.leader() == "a"
        assert store.num_restarts > before
        for server in servers.values():
            server.close()
        await store.close()


async def test_a_sentinel_that_did_not_answer_many_at_once_is_asked_again(tmp_path: Path) -> None:
    with sentinel_fleet(tmp_path) as fleet:
        store = RedisStore(fleet.url, 600)
        first, *others = fleet.sentinels
        first.send_signal(signal.SIGSTOP)
        await asyncio.gather(*(store.leader() for _ in range(4)))
        first.send_signal(signal.SIGCONT)
        for sentinel in others:
            sentinel.kill()
        with redis.Redis(LOOPBACK, fleet.find_primary(), password=PASSWORD) as primary:
            primary.client_kill_filter(_type="normal", skipme=True)  # a new connection asks for the primary
        await asyncio.sleep(0.2)  # the event loop finds that the old ones are closed
        assert await store.leader() is None
        fleet.kill_primary()
        first.kill()
        with pytest.raises(StoreUnavailable, match=r"^no sentinel names a primary of 'records': 127.0.0.1:\d+ \("):
            await store.leader()
        await store.close()
