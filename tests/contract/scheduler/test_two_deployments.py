"""Two deployments, each with a worker of its own, on one Redis."""

from checksum_service import serve
from scheduler_harness import Worker, expected, scheduler, until_recorded
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore


async def test_both_lead_and_run_requests_of_the_same_name(redis_url: str, worker: Worker) -> None:
    service = Worker()
    server, service.port = await serve(service)
    try:
        async with (
            scheduler(redis_url, [worker.port]) as first,
            scheduler(redis_url, [service.port], redis_prefix="second") as second,
            first.session() as to_first,
            second.session() as to_second,
        ):
            await to_first.ready()
            await to_second.ready()
            ours = await to_first.submit(max_tokens=8)
            theirs = await to_second.submit(key=ours.key, max_tokens=20)
            assert await to_first.until_tokens(ours.key, 8) == expected(8)
            assert await to_second.until_tokens(theirs.key, 20) == expected(20)
            for store, count in ((first.store, 8), (second.store, 20)):
                log = await until_recorded(store, ours.key, State.FINISHED)
                assert log.sequences[0].token_ids == expected(count)
            assert not first.leading.done()
            assert not second.leading.done()
    finally:
        service.gate.set()
        await server.stop(0)


async def test_a_successor_takes_over_requests_of_its_own_deployment_only(redis_url: str, worker: Worker) -> None:
    worker.gate.clear()  # nothing ends
    async with scheduler(redis_url, [worker.port]) as first, first.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=8)
        await session.answer(submit.command_id)
        async with scheduler(redis_url, [], redis_prefix="second") as second:
            assert list(second.engine.requests.all) == []
    unprefixed = RedisStore(redis_url, 600)
    assert [log.key for log in await unprefixed.live()] == [submit.key]
    await unprefixed.close()
