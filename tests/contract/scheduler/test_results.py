"""Results other than tokens: computed, recorded, sent again, and recomputed after a loss."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from checksum_service import ChecksumService, logprobs_at, serve
from memory_worker import prompt_value
from ports import lasting_port
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_harness import (
    TIMEOUT,
    Deployment,
    SessionClient,
    candidate,
    expected,
    idle,
    left_behind,
    scheduler,
    until_recorded,
)
from scheduler_svc.live_state import Graces
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.base import Write, WriteBatch
from scheduler_svc.store.redis import RedisStore

CHUNKED = worker_v1.PROMPT_COMPUTATION_CHUNKED
INDIVISIBLE = worker_v1.PROMPT_COMPUTATION_INDIVISIBLE
WITHOUT_KV = worker_v1.PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV
EMBEDDING = worker_v1.ResultKind(embedding=worker_v1.EmbeddingResult())
WITH_PROMPT = worker_v1.ResultKind(prompt_logprobs=worker_v1.PromptLogprobsResult(num_top_logprobs=1))
LONG = list(range(100, 300))  # tokens; a step of the scheduler takes 64
ENDLESS = Graces(detached=3600, broken=3600, taken_over=3600, unclaimed=7200)


@pytest.fixture
def service() -> ChecksumService:
    """A worker that computes all kinds in chunks."""
    return ChecksumService(results={"prompt_logprobs": CHUNKED, "embedding": CHUNKED, "score": CHUNKED})


@pytest.fixture
async def port(service: ChecksumService) -> AsyncIterator[int]:
    """Its address."""
    server, port = await serve(service)
    yield port
    service.gate.set()
    await server.stop(0)


@pytest.fixture
async def running(redis_url: str, port: int) -> AsyncIterator[Deployment]:
    """A scheduler with this worker."""
    async with scheduler(redis_url, [port]) as deployment:
        yield deployment


async def ask_for_value(session: SessionClient, prompt: list[int] = LONG, **fields: object) -> scheduler_v1.Submit:
    known: dict[str, object] = {"prompt_token_ids": prompt, "max_tokens": 0, "result": EMBEDDING}
    return await session.submit(**(known | fields))


def value_of(end: scheduler_v1.SequenceEnd) -> list[float]:
    assert end.WhichOneof("cause") == "value"
    return list(end.value.numbers)


async def until_value(session: SessionClient, key: str) -> list[float]:
    """Waits for the value of a request, which is its only result."""
    [tokens] = [(await session.until(key, "tokens")).tokens]
    assert (tokens.index, tokens.offset, list(tokens.token_ids)) == (0, 0, [])
    return value_of(tokens.end)


def prompt_parts(session: SessionClient, key: str) -> Iterator[scheduler_v1.PromptLogprobs]:
    """Log-probabilities of a prompt, in order of arrival."""
    for event in session.events:
        if event.key == key and event.HasField("prompt_logprobs"):
            yield event.prompt_logprobs
        elif event.key == key and event.HasField("attached") and event.attached.HasField("prompt_logprobs"):
            yield event.attached.prompt_logprobs


def prompt_logprobs(session: SessionClient, key: str) -> list[worker_v1.TokenLogprobs]:
    """All log-probabilities; asserts that each arrives once."""
    found: list[worker_v1.TokenLogprobs] = []
    for part in prompt_parts(session, key):
        assert part.offset == len(found) + 1
        found += part.tokens
    return found


def expected_prompt(prompt: list[int]) -> list[worker_v1.TokenLogprobs]:
    return [logprobs_at(prompt, position) for position in range(1, len(prompt))]


async def test_a_value_is_computed_sent_and_recorded(running: Deployment, store: RedisStore) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await ask_for_value(session)
        assert await until_value(session, submit.key) == prompt_value(LONG, "embedding")
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].end is not None
        assert value_of(log.sequences[0].end) == prompt_value(LONG, "embedding")
    await idle(running.engine)


async def test_a_value_is_sent_with_the_answer_to_its_request(
    running: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.commands._VALUE_DELAY", 60.0)
    async with running.session() as session:
        await session.ready()
        await ask_for_value(session, LONG[:4])
        while not session.events:
            await session.read()
        assert [event.WhichOneof("kind") for event in session.events] == ["accepted", "tokens"]


async def test_a_request_for_a_value_is_answered_before_a_value_that_takes_long(
    running: Deployment, service: ChecksumService
) -> None:
    async with running.session() as session:
        await session.ready()
        service.gate.clear()
        submit = await ask_for_value(session)
        assert (await session.answer(submit.command_id)).HasField("accepted")
        service.gate.set()
        assert await until_value(session, submit.key) == prompt_value(LONG, "embedding")


async def test_a_value_takes_one_step(running: Deployment, service: ChecksumService) -> None:
    async with running.session() as session:
        await session.ready()
        for number in range(4):
            submit = await ask_for_value(session, LONG[number : number + 4])
            await until_value(session, submit.key)
    await idle(running.engine)
    assert [len(step.scheduled.sequence_ids) for step in service.steps] == [1] * 4
    assert not any(step.finished_ids for step in service.steps)


async def test_a_worker_of_the_release_before_is_sent_the_ids_of_sequences_with_values(
    redis_url: str, port: int, service: ChecksumService
) -> None:
    service.about.newest_protocol = 2
    async with scheduler(redis_url, [port]) as running, running.session() as session:
        await session.ready()
        for number in range(4):
            submit = await ask_for_value(session, LONG[number : number + 4])
            await until_value(session, submit.key)
        await idle(running.engine)
    assert [opening.protocol for opening in service.openings] == [2]
    with_value = [number for step in service.steps for number in step.scheduled.sequence_ids]
    assert [number for step in service.steps for number in step.finished_ids] == with_value
    assert len(with_value) == 4


async def test_values_and_tokens_share_steps(running: Deployment, service: ChecksumService) -> None:
    async with running.session() as session:
        await session.ready()
        tokens = await session.submit(max_tokens=100)
        score = worker_v1.ResultKind(score=worker_v1.ScoreResult())
        values = [await ask_for_value(session, [number, *LONG], result=score) for number in range(8)]
        for number, submit in enumerate(values):
            assert await until_value(session, submit.key) == prompt_value([number, *LONG], "score")
        assert await session.until_tokens(tokens.key, 100) == expected(100)
    kinds = [{new.result.WhichOneof("kind") for new in step.new_sequences} for step in service.steps]
    assert {None} in kinds
    assert {"score"} in kinds


async def test_a_value_is_sent_again_to_a_later_attach(running: Deployment, store: RedisStore) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await ask_for_value(session, detachable=True)
        await until_value(session, submit.key)
        await until_recorded(store, submit.key, State.FINISHED)
    async with running.session() as session:
        again = await ask_for_value(session, key=submit.key, body_digest=submit.body_digest)
        for answer in (await session.attach(submit.key), await session.answer(again.command_id)):
            [tokens] = answer.attached.sequences
            assert value_of(tokens.end) == prompt_value(LONG, "embedding")
            assert (tokens.HasField("cached_tokens"), tokens.cached_tokens) == (True, 0)
    assert not running.engine.is_live(submit.key)


async def test_a_value_on_record_outlives_the_scheduler(
    redis_url: str, port: int, service: ChecksumService, store: RedisStore
) -> None:
    async with scheduler(redis_url, [port]) as running, running.session() as session:
        await session.ready()
        submit = await ask_for_value(session)
        await until_value(session, submit.key)
        await until_recorded(store, submit.key, State.FINISHED)
    num_steps = len(service.steps)
    async with scheduler(redis_url, [port]) as running, running.session() as session:
        await session.ready()
        [tokens] = (await session.attach(submit.key)).attached.sequences
        assert value_of(tokens.end) == prompt_value(LONG, "embedding")
    assert not any(step.new_sequences for step in service.steps[num_steps:])


async def test_a_value_that_is_not_on_record_is_computed_again(
    redis_url: str, port: int, service: ChecksumService
) -> None:
    service.gate.clear()
    async with candidate(redis_url, [port]) as first:
        await first.until_leading()
        async with first.session() as session:
            await session.ready()
            submit = await ask_for_value(session)
            await session.answer(submit.command_id)
            async with asyncio.timeout(TIMEOUT):
                while not service.steps:
                    await asyncio.sleep(0.01)
        await first.crash()
    service.gate.set()
    async with scheduler(redis_url, [port], graces=ENDLESS) as running, running.session() as session:
        await session.ready()
        assert (await session.attach(submit.key)).HasField("attached")
        assert await until_value(session, submit.key) == prompt_value(LONG, "embedding")


@pytest.mark.parametrize("result", [EMBEDDING, WITH_PROMPT], ids=["value", "prompt_logprobs"])
async def test_a_worker_that_dies_in_mid_prompt_costs_what_it_computed(
    result: worker_v1.ResultKind, redis_url: str
) -> None:
    results = {"prompt_logprobs": CHUNKED, "embedding": CHUNKED}
    service, port = ChecksumService(results=results), lasting_port()
    server, _ = await serve(service, port)
    async with scheduler(redis_url, [port]) as running, running.session() as session:
        await session.ready()
        max_tokens = 0 if result is EMBEDDING else 5
        service.seconds = 0.05
        submit = await session.submit(prompt_token_ids=LONG, max_tokens=max_tokens, result=result)
        async with asyncio.timeout(TIMEOUT):
            while len(service.steps) < 2:  # of four
                await asyncio.sleep(0.01)
        await server.stop(0)
        service = ChecksumService(results=results)
        server, _ = await serve(service, port)
        if result is EMBEDDING:
            assert await until_value(session, submit.key) == prompt_value(LONG, "embedding")
        else:
            assert await session.until_tokens(submit.key, 5) == expected(5, LONG)
            assert prompt_logprobs(session, submit.key) == expected_prompt(LONG)
        assert sum(sum(step.scheduled.num_tokens) for step in service.steps) >= len(LONG)
    await server.stop(0)


@asynccontextmanager
async def serving(redis_url: str, service: ChecksumService, **settings: object) -> AsyncIterator[SessionClient]:
    """A session with a scheduler that has only this worker."""
    server, port = await serve(service)
    async with scheduler(redis_url, [port], **settings) as running, running.session() as session:
        await session.ready()
        yield session
        await idle(running.engine)
    await server.stop(0)


@pytest.mark.parametrize("computation", [INDIVISIBLE, WITHOUT_KV])
async def test_an_indivisible_prompt_is_computed_in_one_step_whatever_the_budget(
    computation: worker_v1.PromptComputation, redis_url: str
) -> None:
    service = ChecksumService(results={"embedding": computation})
    service.about.max_step_tokens = 220
    async with serving(redis_url, service, max_step_tokens=16) as session:
        tokens = await session.submit(max_tokens=200)
        await session.until_tokens(tokens.key, 1)
        submits = [await ask_for_value(session, LONG[number:]) for number in range(4)]
        for number, submit in enumerate(submits):
            assert await until_value(session, submit.key) == prompt_value(LONG[number:], "embedding")
        assert await session.until_tokens(tokens.key, 200) == expected(200)
        sizes = [sum(step.scheduled.num_tokens) for step in service.steps]
        assert sorted(size for size in sizes if size > 16) == [197, 198, 199, 200]
        assert not any(one > 16 < other for one, other in pairwise(sizes)), "two in a row"
        refused = await ask_for_value(session, list(range(221)))
        failed = (await session.answer(refused.command_id)).failed
        assert failed.reason == scheduler_v1.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED
        assert "220" in failed.message


@pytest.mark.parametrize("result", [EMBEDDING, WITH_PROMPT, worker_v1.ResultKind()], ids=str)
async def test_what_no_worker_computes_is_refused_by_name(result: worker_v1.ResultKind, redis_url: str) -> None:
    service = ChecksumService()
    async with serving(redis_url, service) as session:
        submit = await session.submit(result=result, max_tokens=1 if result is WITH_PROMPT else 0)
        failed = (await session.answer(submit.command_id)).failed
        assert failed.reason == scheduler_v1.FAILURE_REASON_UNSUPPORTED_RESULT
        name = result.WhichOneof("kind") or "result of a kind that this scheduler does not know"
        assert failed.message == f"computes no {name}"
    assert not service.steps


async def test_log_probabilities_of_a_prompt_come_once_before_its_tokens(
    running: Deployment, store: RedisStore, service: ChecksumService
) -> None:
    async with running.session() as session:
        await session.ready()
        before = await session.submit(prompt_token_ids=LONG, max_tokens=1)  # leaves the prompt in the cache
        await session.until(before.key, "tokens")
        submit = await session.submit(prompt_token_ids=LONG, n=2, max_tokens=4, result=WITH_PROMPT)
        for index in range(2):
            assert await session.until_tokens(submit.key, 4, index) == expected(4, LONG)
        assert prompt_logprobs(session, submit.key) == expected_prompt(LONG)
        assert len(list(prompt_parts(session, submit.key))) > 1
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.prompt_logprobs == expected_prompt(LONG)
    async with running.session() as session:
        attached = (await session.attach(submit.key)).attached
        assert list(attached.prompt_logprobs.tokens) == expected_prompt(LONG)
        assert attached.prompt_logprobs.offset == 1
    news = [new for step in service.steps for new in step.new_sequences if new.HasField("result")]
    assert [new.index for new in news] == [0]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
async def test_log_probabilities_come_once_although_prompts_are_preempted(preemption: str, redis_url: str) -> None:
    service = ChecksumService(num_blocks=30, num_host_blocks=64, results={"prompt_logprobs": CHUNKED})
    # Three sequences decode, so a step has room for one prompt token, and blocks run out before the prompt ends.
    settings = {"max_step_tokens": 4, "policy": "fcfs", "preemption": preemption}
    async with serving(redis_url, service, **settings) as session:
        service.gate.clear()
        decodes = []
        for number in range(3):
            decodes.append(await session.submit(prompt_token_ids=[number, 0, 0], max_tokens=60))
            await session.answer(decodes[-1].command_id)  # so that they are before the prompt
        submit = await session.submit(prompt_token_ids=LONG[:60], max_tokens=3, result=WITH_PROMPT)
        await session.answer(submit.command_id)
        service.gate.set()
        assert await session.until_tokens(submit.key, 3) == expected(3, LONG[:60])
        assert prompt_logprobs(session, submit.key) == expected_prompt(LONG[:60])
        for number, decode in enumerate(decodes):
            assert await session.until_tokens(decode.key, 60) == expected(60, [number, 0, 0])
    assert sum(new.HasField("result") for step in service.steps for new in step.new_sequences) > 1, (
        "it was never preempted"
    )


async def test_after_a_takeover_only_what_is_missing_of_a_prompt_is_computed(
    redis_url: str, port: int, service: ChecksumService, store: RedisStore
) -> None:
    submit = await left_behind(store, [], prompt_token_ids=LONG, result=WITH_PROMPT, max_tokens=4)
    epoch = await store.take_lease("before", 30)
    assert epoch is not None
    known = [one.SerializeToString() for one in expected_prompt(LONG)[:70]]
    write = Write(submit.key, submit.submission_id, 0, 0, [], prompt_logprobs=known)
    assert await store.write(WriteBatch(writes=[write]), epoch) == []
    await store.release_lease("before")
    held = scheduler_v1.UnflushedTokens(prompt_logprobs=expected_prompt(LONG)[:90])
    async with scheduler(redis_url, [port], graces=ENDLESS) as running, running.session() as session:
        await session.ready()
        answer = await session.attach(submit.key, held)
        assert len(answer.attached.prompt_logprobs.tokens) == 90
        assert await session.until_tokens(submit.key, 4) == expected(4, LONG)
        assert prompt_logprobs(session, submit.key) == expected_prompt(LONG)
        recorded: RequestLog = await until_recorded(store, submit.key, State.FINISHED)
        assert recorded.prompt_logprobs == expected_prompt(LONG)
