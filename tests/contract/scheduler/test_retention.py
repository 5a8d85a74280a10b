"""How long Redis keeps what a request says, by the request's own choice."""

import asyncio

import pytest
import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_harness import (
    PROMPT,
    TIMEOUT,
    Deployment,
    Worker,
    candidate,
    expected,
    idle,
    left_behind,
    scheduler,
    until_over,
    until_recorded,
)
from scheduler_svc.live_state import Graces
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore

NONE = scheduler_v1.Retention(is_unrecorded=True)
UNTIL_END = scheduler_v1.Retention()
UNKNOWN = scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST
GRACE = 1.0  # seconds


def keys_of(redis_url: str, key: str) -> list[bytes]:
    """The keys in Redis of a request, and the set of live ones if it is a member."""
    with redis.Redis.from_url(redis_url) as client:
        found = list(client.scan_iter(f"{{quire}}:request:{key}*"))
        return [*found, b"live"] if client.sismember("{quire}:live", key) else found


def longest_ttl(redis_url: str, key: str) -> int:
    """The longest TTL of its keys, in seconds."""
    with redis.Redis.from_url(redis_url) as client:
        return max(int(client.ttl(name)) for name in keys_of(redis_url, key))


async def until_gone(redis_url: str, key: str) -> None:
    async with asyncio.timeout(TIMEOUT):
        while keys_of(redis_url, key):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("is_named", [True, False])
async def test_nothing_is_written_of_a_request_that_asks_for_none(
    running: Deployment, redis_url: str, worker: Worker, is_named: bool
) -> None:
    async with running.session() as session:
        await session.ready()
        worker.gate.clear()
        submit = await session.submit(n=2, retention=NONE, detachable=is_named)
        answer = await session.answer(submit.command_id)
        assert not answer.accepted.is_durable
        recorded = await session.submit()
        worker.gate.set()
        for index in range(2):
            assert await session.until_tokens(submit.key, 8, index) == expected(8)
        await until_over(running.engine, recorded.key)
        await running.engine.journal.flush(TIMEOUT)  # what is written of the other one would have been of this one too
        assert keys_of(redis_url, recorded.key)
        assert keys_of(redis_url, submit.key) == []
    await idle(running.engine)


async def test_a_request_that_is_not_recorded_can_be_resumed_while_it_runs(running: Deployment, worker: Worker) -> None:
    async with running.session() as session, running.session() as other:
        await session.ready()
        submit = await session.submit(retention=NONE, detachable=True, max_tokens=200)
        await session.until_tokens(submit.key, 5)
        answer = await other.attach(submit.key)
        assert answer.attached.HasField("is_durable")
        assert not answer.attached.is_durable
        assert answer.attached.retention == NONE
        assert await other.until_tokens(submit.key, 200) == expected(200)
        await until_over(running.engine, submit.key)
        assert (await other.attach(submit.key)).failed.reason == UNKNOWN
        # The name is free again.
        again = await session.submit(key=submit.key, retention=NONE, detachable=True)
        assert (await session.answer(again.command_id)).HasField("accepted")


async def test_the_name_of_a_recorded_request_is_not_free_for_one_that_is_not(
    running: Deployment, store: RedisStore
) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(detachable=True)
        await until_recorded(store, submit.key, State.FINISHED)
        same = await session.submit(key=submit.key, body_digest=submit.body_digest, retention=NONE, detachable=True)
        answer = await session.answer(same.command_id)
        assert list(answer.attached.sequences[0].token_ids) == expected(8)
        assert answer.attached.is_durable
        other = await session.submit(key=submit.key, retention=NONE, detachable=True)
        answer = await session.answer(other.command_id)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_KEY_IN_USE


async def test_a_gateway_continues_a_request_that_is_not_recorded_at_a_new_leader(
    redis_url: str, worker: Worker
) -> None:
    async with candidate(redis_url, [worker.port]) as first:
        await first.until_leading()
        async with first.session() as session:
            await session.ready()
            submit = await session.submit(max_tokens=200, retention=NONE)
            held = await session.until_tokens(submit.key, 40)
            worker.gate.clear()
            await first.crash()
            worker.gate.set()
        async with scheduler(redis_url, [worker.port]) as second, second.session() as anew:
            await anew.ready()
            assert (await anew.attach(submit.key)).failed.reason == UNKNOWN
            unflushed = scheduler_v1.UnflushedTokens(index=0, token_ids=held)
            submit.ClearField("command_id")
            again = scheduler_v1.Submit()
            again.CopyFrom(submit)
            again.command_id = 1000
            again.unflushed.append(unflushed)
            await anew.send(submit=again)
            answer = await anew.answer(1000)
            assert list(answer.attached.sequences[0].token_ids)[:40] == held
            assert await anew.until_tokens(submit.key, 200) == expected(200)
            assert keys_of(redis_url, submit.key) == []


@pytest.mark.parametrize("is_named", [True, False])
async def test_a_record_is_deleted_after_the_end(redis_url: str, worker: Worker, is_named: bool) -> None:
    async with scheduler(redis_url, [worker.port], detach_grace=GRACE) as running, running.session() as session:
        await session.ready()
        worker.gate.clear()
        submit = await session.submit(n=2, retention=UNTIL_END, detachable=is_named)
        answer = await session.answer(submit.command_id)
        assert answer.accepted.is_durable
        assert longest_ttl(redis_url, submit.key) > 60  # a live record is renewed
        worker.gate.set()
        await until_over(running.engine, submit.key)
        await until_gone(redis_url, submit.key)
        assert (await session.attach(submit.key)).failed.reason == UNKNOWN


async def test_a_record_is_there_for_a_client_that_lost_its_connection_at_the_end(
    running: Deployment, redis_url: str, store: RedisStore
) -> None:
    async with running.session() as session, running.session() as other:
        await session.ready()
        submit = await session.submit(retention=UNTIL_END, detachable=True)
        await until_recorded(store, submit.key, State.FINISHED)
        assert longest_ttl(redis_url, submit.key) <= 30  # QUIRE_DETACH_GRACE
        answer = await other.attach(submit.key)
        assert list(answer.attached.sequences[0].token_ids) == expected(8)


@pytest.mark.parametrize(("seconds", "kept"), [(77, 77), (100_000, 600)])
async def test_a_record_is_kept_as_long_as_asked_for_and_allowed(
    redis_url: str, worker: Worker, store: RedisStore, seconds: int, kept: int
) -> None:
    async with scheduler(redis_url, [worker.port], record_ttl=600) as running, running.session() as session:
        await session.ready()
        submit = await session.submit(retention=scheduler_v1.Retention(seconds=seconds))
        await until_recorded(store, submit.key, State.FINISHED)
        assert kept - 60 < longest_ttl(redis_url, submit.key) <= kept


@pytest.mark.parametrize("retention", [UNTIL_END, scheduler_v1.Retention(seconds=20)], ids=["until_end", "seconds"])
async def test_a_new_leader_keeps_to_it(
    redis_url: str, worker: Worker, store: RedisStore, retention: scheduler_v1.Retention
) -> None:
    submit = await left_behind(store, expected(5), retention=retention, detachable=True)
    graces = Graces(taken_over=0.05)
    async with scheduler(redis_url, [worker.port], graces=graces):
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.submit.prompt_token_ids == PROMPT
        assert longest_ttl(redis_url, submit.key) <= 30


async def test_the_record_of_a_cancelled_request_is_deleted_too(
    running: Deployment, redis_url: str, worker: Worker, store: RedisStore
) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=200, retention=UNTIL_END)
        await session.until_tokens(submit.key, 1)
        await session.send(cancel=scheduler_v1.Cancel(key=submit.key))
        await until_recorded(store, submit.key, State.CANCELLED)
        assert longest_ttl(redis_url, submit.key) <= 30
