"""Requests of which Redis has lost tokens are refused by name, never sent as if they were complete."""

import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_harness import SessionClient, Worker, expected, left_behind, scheduler, until_recorded
from scheduler_svc.live_state import Graces
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore

ENDLESS = Graces(taken_over=500, unclaimed=500)


def evict(redis_url: str, key: str) -> None:
    with redis.Redis.from_url(redis_url) as keys:
        assert keys.delete(f"{{quire}}:request:{key}:tokens:0") == 1


async def is_refused(session: SessionClient, submit: scheduler_v1.Submit) -> None:
    """Each command for the request is answered that it was lost: an attach, a resumption, a repeated submission."""
    repeated = scheduler_v1.Submit.FromString(submit.SerializeToString())
    repeated.submission_id, repeated.command_id = "another", 1001
    resumption = scheduler_v1.Submit.FromString(submit.SerializeToString())
    resumption.is_resumption, resumption.command_id = True, 1002
    await session.send(submit=repeated)
    await session.send(submit=resumption)
    for answer in (await session.attach(submit.key), await session.answer(1001), await session.answer(1002)):
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_RECORD_INCOMPLETE
        assert "lost" in answer.failed.message


async def test_a_finished_request_that_lost_its_tokens_is_refused(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    async with scheduler(redis_url, [worker.port]) as first, first.session() as session:
        await session.ready()
        submit = await session.submit(body_digest=b"same")
        await session.until_tokens(submit.key, 8)
        await until_recorded(store, submit.key, State.FINISHED)
    evict(redis_url, submit.key)
    async with scheduler(redis_url, [worker.port]) as second, second.session() as session:
        await session.ready()
        await is_refused(session, submit)


async def test_a_live_request_that_lost_tokens_is_not_taken_over_and_others_are(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    submit = await left_behind(store, expected(5), [], body_digest=b"same")
    other = await left_behind(store, expected(5))
    evict(redis_url, submit.key)
    async with scheduler(redis_url, [worker.port], graces=ENDLESS) as running, running.session() as session:
        await session.ready()
        assert [live.log.key for live in running.engine.requests.all] == [other.key]
        await is_refused(session, submit)
        await session.attach(other.key)
        assert await session.until_tokens(other.key, 20) == expected(20)


async def test_tokens_that_redis_lost_while_the_request_ran_are_written_again(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    async with scheduler(redis_url, [worker.port]) as running, running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=200)
        await session.until_tokens(submit.key, 40)
        worker.gate.clear()
        assert await running.engine.journal.flush(60)
        evict(redis_url, submit.key)
        worker.gate.set()
        assert await session.until_tokens(submit.key, 200) == expected(200)
        assert await running.engine.journal.flush(60)
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].token_ids == expected(200)
