"""One scheduler serves several models and several versions of one; a request runs on workers of its version."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from checksum_service import ChecksumService, serve
from ports import lasting_port
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_harness import (
    TIMEOUT,
    Deployment,
    SessionClient,
    Worker,
    candidate,
    expected,
    left_behind,
    scheduler,
    until_recorded,
)
from scheduler_svc.live_state import Graces
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore
from svc_common.protocols import SESSION_PROTOCOLS, ProtocolRange

PROMPT = list(range(100, 117))


@asynccontextmanager
async def serving(*services: ChecksumService) -> AsyncIterator[list[int]]:
    """The ports of the workers."""
    running = [await serve(service) for service in services]
    try:
        yield [port for _, port in running]
    finally:
        for server, _ in running:
            await server.stop(0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not holds():
            await asyncio.sleep(0.01)


async def listed(session: SessionClient, *names: str) -> None:
    """Reads until these models are ready."""
    async with asyncio.timeout(TIMEOUT):
        while session.status is None or [model.name for model in session.status.models] != list(names):
            await session.read()


def prompts(service: ChecksumService) -> set[tuple[int, ...]]:
    """Prompts of the sequences that a worker received."""
    new = [new for step in service.steps for new in step.new_sequences]
    return {tuple(one.token_ids[: one.prompt_length]) for one in new}


async def test_each_request_runs_at_the_workers_of_its_model(redis_url: str) -> None:
    large, small = ChecksumService(model="large"), ChecksumService(model="small", fingerprint=b"small")
    async with serving(large, small) as ports, scheduler(redis_url, ports) as running:
        await until(lambda: len(running.engine.replicas) == 2)
        async with running.session() as session:
            await session.read()
            assert session.status is not None
            assert {model.name for model in session.status.models} == {"large", "small"}
            assert session.status.model == session.status.models[0]
            protocols = ProtocolRange(session.status.oldest_protocol, session.status.newest_protocol)
            assert protocols == SESSION_PROTOCOLS
            submits = {
                name: await session.submit(model=name, prompt_token_ids=[*PROMPT, number])
                for number, name in enumerate(("large", "small"))
            }
            for number, submit in enumerate(submits.values()):
                await session.until(submit.key, "tokens")
                assert session.tokens(submit.key) == expected(8, [*PROMPT, number])
    assert prompts(large) == {(*PROMPT, 0)}
    assert prompts(small) == {(*PROMPT, 1)}


async def test_a_submission_of_protocol_1_names_its_model_for_clients_only(redis_url: str) -> None:
    large, small = ChecksumService(model="large"), ChecksumService(model="small", fingerprint=b"small")
    async with serving(large, small) as ports, scheduler(redis_url, ports) as running:
        await until(lambda: len(running.engine.replicas) == 2)
        async with running.session() as session:
            submit = await session.submit(render_options=scheduler_v1.RenderOptions(model="small"))
            await session.until(submit.key, "tokens")
    assert not large.steps


async def test_prefixes_of_one_model_are_not_found_by_another(redis_url: str) -> None:
    services = [ChecksumService(model=name, fingerprint=name.encode()) for name in ("large", "small")]
    async with serving(*services) as ports, scheduler(redis_url, ports) as running:
        await until(lambda: len(running.engine.replicas) == 2)
        async with running.session() as session:
            cached = []
            for name in ("large", "small", "large", "small"):
                submit = await session.submit(model=name, prompt_token_ids=PROMPT)
                await session.until(submit.key, "tokens")
                first = next(
                    event.tokens for event in session.events if event.key == submit.key and event.HasField("tokens")
                )
                cached.append(first.cached_tokens)
    assert cached == [0, 0, 16, 16]


async def test_the_loss_of_a_models_only_worker_leaves_other_models_alone(redis_url: str) -> None:
    large, small = ChecksumService(model="large"), ChecksumService(model="small", fingerprint=b"small")
    async with serving(large) as ports:
        server, port = await serve(small, lasting_port())
        async with scheduler(redis_url, [*ports, port], worker_patience=1) as running, running.session() as session:
            await until(lambda: len(running.engine.replicas) == 2)
            goes_on, waits = [await session.submit(model=name, max_tokens=200) for name in ("large", "small")]
            for submit in (goes_on, waits):
                await session.until_tokens(submit.key, 5)
            await server.stop(0)
            await listed(session, "large")
            assert await session.until_tokens(goes_on.key, 200) == expected(200)
            server, _ = await serve(small, port)
            assert await session.until_tokens(waits.key, 200) == expected(200)
            await session.ready()
            assert len(large.openings) == 1
        await server.stop(0)


@pytest.mark.parametrize(
    "stranger", [{"model": "other"}, {"fingerprint": b"other version"}], ids=["another model", "another version"]
)
async def test_a_worker_of_another_model_that_comes_first_costs_no_request(
    stranger: dict[str, str | bytes], redis_url: str, worker: Worker, store: RedisStore
) -> None:
    submit = await left_behind(store, expected(5), fingerprint=worker.about.fingerprint, detachable=True)
    other, port = ChecksumService(**{"fingerprint": b"other"} | stranger), lasting_port()  # type: ignore[arg-type]
    async with serving(other) as ports, scheduler(redis_url, [*ports, port], graces=Graces(taken_over=0.05)) as running:
        await until(lambda: len(running.engine.replicas) == 1)
        await until(lambda: running.engine.requests.get(submit.key) is not None)
        server, _ = await serve(worker, port)
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].token_ids == expected(20)
        assert not other.steps
        await server.stop(0)


async def test_of_two_versions_the_newer_takes_new_requests_and_the_older_ends_its_own(redis_url: str) -> None:
    old, new, port = ChecksumService(), ChecksumService(fingerprint=b"new"), lasting_port()
    async with serving(old) as ports, scheduler(redis_url, [*ports, port]) as running, running.session() as session:
        await session.ready()
        begun = await session.submit(max_tokens=200)
        await session.until_tokens(begun.key, 5)
        server, _ = await serve(new, port)
        await until(lambda: len(running.engine.replicas) == 2)
        assert [model.fingerprint for model in running.engine.models.listed] == [b"new"]
        after = await session.submit(prompt_token_ids=PROMPT)
        await session.until(after.key, "tokens")
        assert await session.until_tokens(begun.key, 200) == expected(200)
        assert prompts(new) == {tuple(PROMPT)}
        assert tuple(PROMPT) not in prompts(old)
        await server.stop(0)


async def test_a_request_without_tokens_moves_to_the_version_that_replaces_its_own(redis_url: str) -> None:
    old, port = ChecksumService(), lasting_port()
    server, _ = await serve(old, port)
    async with scheduler(redis_url, [port]) as running, running.session() as session:
        await session.ready()
        old.gate.clear()
        submit = await session.submit(max_tokens=200)
        await until(lambda: bool(old.steps))
        await server.stop(0)
        server, _ = await serve(ChecksumService(fingerprint=b"new"), port)
        assert await session.until_tokens(submit.key, 200) == expected(200)
        [model] = running.engine.models
        assert model.fingerprint == b"new"
    await server.stop(0)


async def test_a_request_with_tokens_ends_with_the_version_that_computed_them(redis_url: str) -> None:
    old, port = ChecksumService(), lasting_port()
    server, _ = await serve(old, port)
    async with scheduler(redis_url, [port]) as running, running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=200)
        await session.until_tokens(submit.key, 5)
        old.gate.clear()
        await server.stop(0)
        server, _ = await serve(ChecksumService(fingerprint=b"new"), port)
        failed = await session.until(submit.key, "failed")
        assert failed.failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        [model] = running.engine.models
        assert model.fingerprint == b"new"
    await server.stop(0)


async def test_a_version_that_does_not_come_back_ends_its_requests(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    submit = await left_behind(store, expected(5), fingerprint=b"old", detachable=True)
    settings = {"graces": Graces(taken_over=0.05), "worker_patience": 1}
    async with scheduler(redis_url, [worker.port, lasting_port()], **settings):  # one address does not answer
        log = await until_recorded(store, submit.key, State.FAILED)
    assert log.failure == scheduler_v1.FAILURE_REASON_UNAVAILABLE
    assert worker.steps == []


async def test_a_session_of_an_unknown_protocol_is_refused(running: Deployment) -> None:
    async with running.session() as session:
        await session.send(hello=scheduler_v1.Hello(protocol=99))
        assert await session.end() is grpc.StatusCode.FAILED_PRECONDITION
    async with running.session() as session:
        await session.send(hello=scheduler_v1.Hello(protocol=2))
        submit = await session.submit()
        await session.until(submit.key, "tokens")


async def test_tokens_that_a_gateway_brings_stay_with_the_version_that_computed_them(redis_url: str) -> None:
    """The request was not recorded: only the gateway knows its tokens, and which version computed them."""
    old, new = ChecksumService(), ChecksumService(fingerprint=b"new")
    async with serving(old, new) as ports, scheduler(redis_url, ports) as running:
        await until(lambda: len(running.engine.replicas) == 2)
        [serving_new] = running.engine.models.listed
        other = old if serving_new.fingerprint == b"new" else new
        async with running.session() as session:
            held = scheduler_v1.UnflushedTokens(index=0, offset=0, token_ids=expected(5))
            submit = await session.submit(
                max_tokens=20, unflushed=[held], model_fingerprint=other.about.fingerprint, model="checksum"
            )
            assert await session.until_tokens(submit.key, 20) == expected(20)
    assert other.steps
    assert not (new if other is old else old).steps


async def test_the_first_tokens_say_which_version_computed_them(running: Deployment) -> None:
    async with running.session() as session:
        submit = await session.submit(n=2)
        for index in range(2):
            await session.until_tokens(submit.key, 8, index)
        tokens = [event.tokens for event in session.events if event.key == submit.key and event.HasField("tokens")]
        assert all(one.model_fingerprint == (b"" if one.offset else b"checksum") for one in tokens)
        answer = await session.attach(submit.key)
        assert [one.model_fingerprint for one in answer.attached.sequences] == [b"checksum"] * 2


async def test_tokens_of_another_tokenizer_are_not_run(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(tokenizer_fingerprint=b"another")
        refused = await session.answer(submit.command_id)
        assert refused.failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        await session.until((await session.submit(tokenizer_fingerprint=b"tokens")).key, "tokens")


async def test_requests_that_wait_at_workers_that_end_move_to_another_version(redis_url: str) -> None:
    old, new, port = ChecksumService(), ChecksumService(fingerprint=b"new"), lasting_port()
    async with serving(old) as ports, scheduler(redis_url, [*ports, port]) as running, running.session() as session:
        await session.ready()
        old.gate.clear()
        submit = await session.submit(max_tokens=20)
        await until(lambda: bool(old.steps))
        server, _ = await serve(new, port)
        await until(lambda: len(running.engine.replicas) == 2)
        running.engine.retire_worker(next(one for one in running.engine.replicas if one.shape.fingerprint != b"new"))
        assert await session.until_tokens(submit.key, 20) == expected(20)
        assert new.steps
        old.gate.set()
        await server.stop(0)


async def test_a_request_without_tokens_does_not_wait_for_a_lost_version(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    gone = await left_behind(store, expected(5), fingerprint=b"gone", detachable=True)
    waits = await left_behind(store, [], detachable=True)
    async with scheduler(redis_url, [worker.port], graces=Graces(taken_over=0.05)):
        await until_recorded(store, gone.key, State.FAILED)
        log = await until_recorded(store, waits.key, State.FINISHED)
    assert log.sequences[0].token_ids == expected(20)


async def test_what_is_queued_at_the_last_worker_of_an_old_tokenizer_ends_there(redis_url: str) -> None:
    """Requests that were tokenized for the old version cannot move to the new one."""
    old, new, port = ChecksumService(), ChecksumService(fingerprint=b"new"), lasting_port()
    old.about.tokenizer_fingerprint, old.about.max_sequences = b"old tokens", 1
    async with serving(old) as ports, scheduler(redis_url, [*ports, port]) as running, running.session() as session:
        await session.ready()
        old.gate.clear()
        submits = [
            await session.submit(prompt_token_ids=[*PROMPT, number], tokenizer_fingerprint=b"old tokens")
            for number in range(3)
        ]
        await until(lambda: bool(old.steps))
        server, _ = await serve(new, port)
        await listed(session, "checksum", "checksum")
        assert session.status is not None
        tokenizers = [model.tokenizer_fingerprint for model in session.status.models]
        assert tokenizers == [b"old tokens", b"tokens"], "the preferred one is the last"
        old.about.is_draining = True
        await listed(session, "checksum")
        # A gateway may send one more before it receives the status.
        submits.append(await session.submit(prompt_token_ids=[*PROMPT, 3], tokenizer_fingerprint=b"old tokens"))
        await session.answer(submits[-1].command_id)
        old.gate.set()
        for number, submit in enumerate(submits):
            assert await session.until_tokens(submit.key, 8) == expected(8, [*PROMPT, number])
        await until(lambda: [replica.shape.fingerprint for replica in running.engine.replicas] == [b"new"])
        assert not new.steps
        await server.stop(0)


async def test_a_new_leader_uses_a_worker_that_drains_for_requests_that_it_alone_can_end(
    redis_url: str, store: RedisStore
) -> None:
    old, new = ChecksumService(), ChecksumService(fingerprint=b"new")
    async with serving(old, new) as ports:
        settings = {"graces": Graces(taken_over=0.05), "lease_seconds": 0.5}
        async with candidate(redis_url, ports[:1], **settings) as first:
            await first.until_leading()
            async with first.session() as session:
                await session.ready()
                submits = [await session.submit(prompt_token_ids=[*PROMPT, n], max_tokens=200) for n in range(2)]
                async with asyncio.timeout(TIMEOUT):
                    for submit in submits:
                        while (log := await store.read(submit.key)) is None or not log.fingerprint:
                            await asyncio.sleep(0.01)
            await first.crash()
        old.about.is_draining = True
        async with scheduler(redis_url, ports, **settings) as second, second.session() as session:
            await until(lambda: len(second.engine.replicas) == 2)
            for number, submit in enumerate(submits):
                await session.attach(submit.key)
                assert await session.until_tokens(submit.key, 200) == expected(200, [*PROMPT, number])
            await until(lambda: [one.shape.fingerprint for one in second.engine.replicas] == [b"new"])
            assert not new.steps
            await session.until((await session.submit()).key, "tokens")
            assert new.steps
