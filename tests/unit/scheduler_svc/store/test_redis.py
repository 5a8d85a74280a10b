"""What is stored in Redis, and the behaviour when Redis fails."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from redis_server import RedisServer, running_server
from request_logs import length_end, logprobs, request_log
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.base import Ending, StoreUnavailable, Write, WriteBatch
from scheduler_svc.store.redis import RedisStore
from tools import tool

EPOCH = 100
TTL = 500


def whole(log: RequestLog, tokens: list[int]) -> Write:
    packed = [one.SerializeToString() for one in log.sequences[0].logprobs]
    end = length_end().SerializeToString()
    return Write(log.key, log.submit.submission_id, 0, 0, tokens, packed, 0, end)


async def again(store: RedisStore, epoch: int = EPOCH) -> None:
    """Waits until the store answers."""
    async with asyncio.timeout(60):
        while True:
            try:
                await store.leader()
                await store.write(WriteBatch(), epoch)
                await store.read("no such key")
                return
            except StoreUnavailable:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def relayed(url: str, send: Callable[[asyncio.StreamWriter, bytes], object]) -> AsyncIterator[str]:
    """The URL of a relay to a server. Each answer is given to `send`, with the client's connection."""
    server = urlsplit(url)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, asked = await asyncio.open_connection(server.hostname, server.port)

        async def answer() -> None:
            while data := await answers.read(1 << 16):
                send(writer, data)

        answering = asyncio.create_task(answer())
        while data := await reader.read(1 << 16):
            asked.write(data)
        answering.cancel()
        asked.close()
        writer.close()

    relaying = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = relaying.sockets[0].getsockname()[1]
    login = f"{server.username or ''}:{server.password}@" if server.password else ""
    try:
        yield f"redis://{login}127.0.0.1:{port}{server.path}"
    finally:
        relaying.close()


@pytest.fixture(params=["embedded", "installed"])
def mortal(request: pytest.FixtureRequest, tmp_path: Path) -> RedisServer:
    """A server for the test, not started."""
    return RedisServer(tmp_path, tool("redis-server") if request.param == "installed" else None)


async def test_every_key_expires(store: RedisStore, keys: "redis.Redis") -> None:
    await store.take_lease("a", 30)
    epoch = await store.take_lease("a", 30)
    assert epoch is not None
    running, over = request_log(), request_log()
    for log in (running, over):
        log.sequences[0].logprobs = logprobs(-1, -2)
        assert await store.put(log, epoch) is None
        await store.write(WriteBatch(writes=[whole(log, [1, 2])]), epoch)
        cut = Write(log.key, log.submit.submission_id, 0, 1, [], truncates=True)
        await store.write(WriteBatch(writes=[cut]), epoch)
    await store.write(WriteBatch(endings=[Ending(over.key, over.submit.submission_id, State.FINISHED, 1.0)]), epoch)
    ttls = {name: keys.ttl(name) for name in keys.scan_iter()}
    assert len(ttls) == 9  # two records with tokens and logprobs, the live ones, epoch, lease
    assert all(ttl > 0 for ttl in ttls.values())


async def test_renewal_starts_the_time_of_all_of_a_request_anew(store: RedisStore, keys: "redis.Redis") -> None:
    log, other = request_log(), request_log()
    log.sequences[0].logprobs = logprobs(-1, -2)
    for one in (log, other):
        await store.put(one, EPOCH)
        await store.write(WriteBatch(writes=[whole(one, [1, 2])]), EPOCH)
    for name in keys.scan_iter():
        keys.expire(name, 60)
    await store.renew([log.key, "no such key"], EPOCH)
    renewed = {name.decode() for name in keys.scan_iter() if keys.ttl(name) > 60}
    record = "{quire}:request:" + log.key
    assert renewed == {record, record + ":tokens:0", record + ":logprobs:0", "{quire}:live"}


async def test_the_end_starts_the_time_anew(store: RedisStore, keys: "redis.Redis") -> None:
    log = request_log()
    await store.put(log, EPOCH)
    await store.write(WriteBatch(writes=[whole(log, [1, 2])]), EPOCH)
    record = "{quire}:request:" + log.key
    for name in (record, record + ":tokens:0"):
        keys.expire(name, 60)
    await store.write(WriteBatch(endings=[Ending(log.key, log.submit.submission_id, State.FINISHED, 1.0)]), EPOCH)
    assert keys.ttl(record) > 60
    assert keys.ttl(record + ":tokens:0") > 60


async def test_a_thousand_tokens_take_less_than_sixteen_kilobytes(store: RedisStore, keys: "redis.Redis") -> None:
    def held() -> int:
        return sum(keys.memory_usage(name) or 0 for name in keys.scan_iter())

    logs = [request_log() for _ in range(5)]
    await store.write(WriteBatch(logs), EPOCH)
    for offset in range(200):  # as steps bring them: strings that grow have room to grow
        writes = [Write(log.key, log.submit.submission_id, 0, offset, [40_000], None, 0) for log in logs]
        assert await store.write(WriteBatch(writes=writes), EPOCH) == []
    running = held()
    end = length_end().SerializeToString()
    writes = [Write(log.key, log.submit.submission_id, 0, 200, [], end=end) for log in logs]
    endings = [Ending(log.key, log.submit.submission_id, State.FINISHED, 1.0) for log in logs]
    await store.write(WriteBatch(writes=writes, endings=endings), EPOCH)
    assert max(running, held()) < 16_000


async def test_a_restarted_server_keeps_its_records_and_its_restart_is_noticed(mortal: RedisServer) -> None:
    store, log = RedisStore(mortal.url, TTL), request_log()
    try:
        mortal.start()
        await store.put(log, EPOCH)
        await store.write(WriteBatch(writes=[whole(log, [1, 2])]), EPOCH)
        restarts = store.num_restarts
        mortal.kill()
        mortal.start()
        await again(store)
        assert store.num_restarts > restarts
        found = await store.read(log.key)
        assert found is not None
        assert found.sequences[0].token_ids == [1, 2]
        restarts = store.num_restarts
        await store.write(WriteBatch(), EPOCH)
        assert store.num_restarts == restarts
    finally:
        mortal.kill()
        await store.close()


async def test_a_server_that_is_gone_is_unavailable_until_it_is_back(mortal: RedisServer) -> None:
    store, log = RedisStore(mortal.url, TTL), request_log()
    try:
        mortal.start()
        await store.put(log, EPOCH)
        mortal.kill()
        assert store.is_answering
        for call in (store.put(log, EPOCH), store.write(WriteBatch(), EPOCH), store.read(log.key), store.leader()):
            with pytest.raises(StoreUnavailable):
                await call
        assert not store.is_answering
        mortal.start()
        await again(store)
        assert store.is_answering
        assert len(await store.live()) == 1
    finally:
        mortal.kill()
        await store.close()


async def test_a_server_that_hangs_is_unavailable_and_what_it_did_late_may_be_repeated(mortal: RedisServer) -> None:
    store, log = RedisStore(mortal.url, TTL), request_log()
    try:
        mortal.start()
        await store.put(log, EPOCH)
        first = WriteBatch(writes=[Write(log.key, log.submit.submission_id, 0, 0, [1, 2, 3])])
        mortal.pause()
        with pytest.raises(StoreUnavailable):
            await store.write(first, EPOCH)
        mortal.resume()
        await again(store)
        # The first call has reached the server, which runs it after SIGCONT.
        assert await store.write(first, EPOCH) == []
        further = WriteBatch(writes=[Write(log.key, log.submit.submission_id, 0, 3, [4])])
        assert await store.write(further, EPOCH) == []
        found = await store.read(log.key)
        assert found is not None
        assert found.sequences[0].token_ids == [1, 2, 3, 4]
    finally:
        mortal.resume()
        mortal.kill()
        await store.close()


async def test_a_write_that_comes_behind_a_later_one_is_not_done(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = request_log()
    await store.write(WriteBatch([log], [Write(log.key, log.submit.submission_id, 0, 0, [1, 2, 3])]), EPOCH)
    late = RedisStore(server.url, TTL)
    with monkeypatch.context() as earlier:
        earlier.setattr("time.time_ns", lambda: 1000)
        cut = Write(log.key, log.submit.submission_id, 0, 0, [9], truncates=True)
        with pytest.raises(StoreUnavailable):
            await late.write(WriteBatch(writes=[cut]), EPOCH)
    await late.close()
    found = await store.read(log.key)
    assert found is not None
    assert found.sequences[0].token_ids == [1, 2, 3]


async def test_a_deletion_whose_connection_breaks_has_deleted(store: RedisStore, server: RedisServer) -> None:
    is_lost = asyncio.Event()
    is_lost.set()

    def send(writer: asyncio.StreamWriter, data: bytes) -> None:
        if is_lost.is_set():
            writer.write(data)
        else:
            is_lost.set()
            writer.close()

    log = request_log()
    await store.put(log, EPOCH)
    async with relayed(server.url, send) as url:
        through_relay = RedisStore(url, TTL)
        try:
            assert await through_relay.read(log.key) is not None
            is_lost.clear()
            assert await through_relay.delete(log.key, EPOCH)
            assert is_lost.is_set()
            assert await store.read(log.key) is None
            assert not await through_relay.delete(log.key, EPOCH), "another call"
        finally:
            await through_relay.close()


async def test_more_puts_than_a_slow_server_answers_do_not_keep_the_steps_and_the_lease_waiting(
    mortal: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        mortal.start()
        # Answers take 0.15 s longer.
        loop = asyncio.get_running_loop()
        async with relayed(mortal.url, lambda writer, data: loop.call_later(0.15, writer.write, data)) as url:
            monkeypatch.setattr(
                "scheduler_svc.store.connection._TIMEOUT", 60
            )  # of connections and answers, not of turns
            store = RedisStore(url, TTL)
            epoch = await store.take_lease("a", 60)
            assert epoch is not None
            await again(store, epoch)
            restarts = store.num_restarts
            puts = [asyncio.create_task(store.put(request_log(), epoch)) for _ in range(400)]
            for _ in range(4):
                assert await store.keep_lease("a", epoch, 60)
                assert await store.write(WriteBatch([request_log()]), epoch) == []
            outcomes = await asyncio.gather(*puts, return_exceptions=True)
            assert any(isinstance(one, StoreUnavailable) for one in outcomes)
            assert None in outcomes
            assert store.is_answering
            assert store.num_restarts == restarts
            await store.close()
    finally:
        mortal.kill()


async def test_a_lease_that_is_not_answered_for_is_given_up_in_time_to_ask_again(
    mortal: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.store.connection._TIMEOUT", 60)
    store = RedisStore(mortal.url, TTL)
    try:
        mortal.start()
        epoch = await store.take_lease("a", 30)
        assert epoch is not None
        mortal.pause()
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await store.keep_lease("a", epoch, 4)
        assert time.monotonic() - started < 4
        mortal.resume()
        assert await store.keep_lease("a", epoch, 30)
    finally:
        mortal.resume()
        mortal.kill()
        await store.close()


async def test_a_url_that_asks_for_text_gets_bytes(server: RedisServer, keys: "redis.Redis") -> None:
    store, log = RedisStore(f"{server.url}?decode_responses=true", TTL), request_log()
    assert (epoch := await store.take_lease("a", 30)) is not None
    assert await store.leader() == "a"
    assert await store.put(log, epoch) is None
    assert await store.write(WriteBatch(writes=[whole(log, [200, 255])]), epoch) == []
    assert [one.sequences[0].token_ids for one in await store.live()] == [[200, 255]]
    await store.close()


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_url_that_limits_connections_delays_calls_and_fails_none(server: RedisServer, limit: int) -> None:
    store = RedisStore(f"{server.url}?max_connections={limit}&socket_timeout=30", 500)
    assert await asyncio.gather(*(store.read(str(number)) for number in range(60))) == [None] * 60
    assert store.num_restarts == 0
    await store.close()


async def test_nobody_listening_is_unavailable(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        store = RedisStore(server.url, TTL)
    with pytest.raises(StoreUnavailable):
        await store.take_lease("a", 1)
    await store.close()


async def test_what_is_cancelled_under_way_leaves_the_next_answer_alone(mortal: RedisServer) -> None:
    store = RedisStore(mortal.url, TTL)
    try:
        mortal.start()
        await store.take_lease("a", 30)
        mortal.pause()
        call = asyncio.create_task(store.leader())
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        mortal.resume()
        assert await store.read("no such key") is None
        assert await store.leader() == "a"
    finally:
        mortal.resume()
        mortal.kill()
        await store.close()


async def test_a_transport_that_uvloop_has_closed_is_a_lost_connection(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    evalsha = store._steps._redis.evalsha

    async def closed_once(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")
        return await evalsha(*arguments)

    monkeypatch.setattr(store._steps._redis, "evalsha", closed_once)
    assert await store.write(WriteBatch(), EPOCH) == []
    assert (calls, store.num_restarts) == (2, 1)


async def test_a_server_that_became_a_replica_counts_as_lost(mortal: RedisServer) -> None:
    mortal.start()
    store = RedisStore(mortal.url, TTL)
    try:
        await again(store)
        num_restarts = store.num_restarts
        with redis.Redis.from_url(mortal.url) as keys:
            keys.replicaof("127.0.0.1", "1")
            with pytest.raises(StoreUnavailable, match="the server is a replica"):
                await store.write(WriteBatch(), EPOCH)
            assert not store.is_answering
            assert store.num_restarts > num_restarts  # another server may have taken its place
            keys.replicaof("NO", "ONE")
        await again(store)
        assert store.is_answering
    finally:
        await store.close()
        mortal.kill()
