"""A Redis that is full refuses writes: requests run without a record, and say so."""

import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_harness import Deployment, Worker, expected, scheduler, until_recorded
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore


async def test_a_request_that_cannot_be_recorded_is_accepted_as_not_durable(
    running: Deployment, redis_url: str, store: RedisStore
) -> None:
    with redis.Redis.from_url(redis_url) as keys:
        async with running.session() as session:
            await session.ready()
            submit = await session.submit()
            assert (await session.answer(submit.command_id)).accepted.is_durable
            keys.config_set("maxmemory", 1)
            try:
                unrecorded = await session.submit(max_tokens=20)
                assert not (await session.answer(unrecorded.command_id)).accepted.is_durable
                assert await session.until_tokens(unrecorded.key, 20) == expected(20)
            finally:
                keys.config_set("maxmemory", 0)
            await until_recorded(store, unrecorded.key, State.FINISHED)


async def test_it_is_refused_where_the_store_is_needed(redis_url: str, worker: Worker) -> None:
    async with scheduler(redis_url, [worker.port], without_store="refuse") as running, running.session() as session:
        await session.ready()
        with redis.Redis.from_url(redis_url) as keys:
            keys.config_set("maxmemory", 1)
            try:
                submit = await session.submit()
                answer = await session.answer(submit.command_id)
            finally:
                keys.config_set("maxmemory", 0)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_STORE_DEGRADED
