"""Workers connect, disconnect and send invalid responses; requests continue."""

import asyncio

import pytest

from checksum_service import ChecksumService, serve
from ports import lasting_port
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_harness import PROMPT, TIMEOUT, Deployment, Worker, expected, scheduler, until_recorded
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore


async def test_worker_that_restarts_gets_its_sequences_anew(redis_url: str) -> None:
    service = ChecksumService()
    server, port = await serve(service, lasting_port())
    async with scheduler(redis_url, [port]) as running, running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=150, has_stop_strings=True)
        await session.until_tokens(submit.key, 64)  # it pauses when it is this far ahead of its gateway
        await server.stop(0)
        service = ChecksumService(epoch=running.engine.epoch + 10)
        server, _ = await serve(service, port)
        await session.send(acknowledge=scheduler_v1.Acknowledge(key=submit.key, num_tokens=150))
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == expected(150)
        assert service.openings[0].epoch > service.about.epoch
        [new] = service.steps[0].new_sequences
        assert len(new.token_ids) > len(PROMPT)
        assert new.prompt_length == len(PROMPT)
    await server.stop(0)


async def test_two_workers_share_the_queue_and_one_of_another_version_gets_no_steps(redis_url: str) -> None:
    services = [ChecksumService(), ChecksumService()]
    served = [await serve(service) for service in services]
    late, late_port = await serve(ChecksumService(), lasting_port())
    await late.stop(0)
    async with scheduler(redis_url, [served[0][1], served[1][1], late_port]) as running, running.session() as session:
        await session.ready()
        async with asyncio.timeout(TIMEOUT):
            while len(running.engine.replicas) < 2:
                await asyncio.sleep(0.01)
        stranger = ChecksumService(fingerprint=b"another")
        served.append(await serve(stranger, late_port))
        async with asyncio.timeout(TIMEOUT):
            while not stranger.openings:
                await asyncio.sleep(0.01)
        keys = [(await session.submit(max_tokens=60)).key for _ in range(20)]
        for key in keys:
            await session.until(key, "tokens")
            assert session.tokens(key) == expected(60)
        assert all(service.steps for service in services)
        assert not stranger.steps
    for server, _ in served:
        await server.stop(0)


async def test_requests_are_taken_for_a_while_after_the_last_worker_left(redis_url: str) -> None:
    service = ChecksumService()
    server, port = await serve(service, lasting_port())
    async with scheduler(redis_url, [port], worker_patience=3) as running, running.session() as session:
        model = await session.ready()
        await server.stop(0)
        submit = await session.submit()
        assert (await session.answer(submit.command_id)).HasField("accepted")
        assert session.status is not None
        assert session.status.model == model
        async with asyncio.timeout(TIMEOUT):
            while session.status.HasField("model"):
                await session.read()
        server, _ = await serve(service, port)
        assert await session.until_tokens(submit.key, 8) == expected(8)
        assert await session.ready() == model
    await server.stop(0)


async def test_what_a_draining_worker_has_goes_elsewhere(redis_url: str) -> None:
    services = [ChecksumService(), ChecksumService()]
    served = [await serve(service) for service in services]
    async with scheduler(redis_url, [port for _, port in served]) as running, running.session() as session:
        await session.ready()
        async with asyncio.timeout(TIMEOUT):
            while len(running.engine.replicas) < 2:
                await asyncio.sleep(0.01)
        leaving = next(replica for replica in running.engine.replicas if replica.name.endswith(str(served[0][1])))
        submits = [await session.submit(max_tokens=200) for _ in range(4)]
        await session.until_tokens(submits[0].key, 5)
        services[0].about.is_draining = True
        running.engine.retire_worker(leaving)
        for submit in submits:
            assert await session.until_tokens(submit.key, 200) == expected(200)
        async with asyncio.timeout(TIMEOUT):
            while leaving in running.engine.replicas:
                await asyncio.sleep(0.01)
    for server, _ in served:
        await server.stop(0)


@pytest.mark.parametrize("change", [{"num_tokens": [1, 1]}, {"token_ids": [1, 2]}, {"sequence_ids": [99]}], ids=str)
async def test_an_answer_that_does_not_fit_its_step_costs_the_stream_and_no_request(
    change: dict[str, list[int]], running: Deployment, worker: Worker
) -> None:
    worker.spoil = change
    async with running.session() as session:
        await session.ready()
        submit = await session.submit()
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == expected(8)
        assert len(worker.openings) == 2


async def test_a_request_without_room_ends_with_a_reason(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=1000)
        answer = await session.answer(submit.command_id)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED


async def test_steps_of_a_worker_that_speculates_return_none_to_several_tokens(
    redis_url: str, store: RedisStore
) -> None:
    service = ChecksumService(max_sampled_tokens=4)
    server, port = await serve(service)
    async with scheduler(redis_url, [port]) as running, running.session() as session:
        await session.ready()
        submits = [await session.submit(max_tokens=count) for count in (1, 2, 50, 100)]
        for submit in submits:
            await session.until(submit.key, "tokens")
            assert session.tokens(submit.key) == expected(submit.max_tokens)
        recorded = await until_recorded(store, submits[-1].key, State.FINISHED)
        assert recorded.sequences[0].token_ids == expected(100)
    assert set(service.num_returned) == {0, 1, 2, 3, 4}
    await server.stop(0)
