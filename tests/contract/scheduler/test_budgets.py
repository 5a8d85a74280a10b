"""Budgets of tokens and requests: what is delivered, over the failures of schedulers and of the store."""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from hashlib import sha256

import pytest
import redis
from google.protobuf.duration_pb2 import Duration

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from redis_server import RedisServer, running_server
from scheduler_harness import (
    PROMPT,
    TIMEOUT,
    Deployment,
    SessionClient,
    Worker,
    candidate,
    expected,
    scheduler,
    until_recorded,
)
from scheduler_svc.core.budgets import LEASE_SHARE
from scheduler_svc.live_state import Graces
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore

PER_MINUTE = 300


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis for the test, because it is killed."""
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
async def session(running: Deployment) -> AsyncIterator[SessionClient]:
    async with running.session() as session:
        await session.ready()
        yield session


def account(**limits: object) -> scheduler_v1.AccountLimits:
    """The limits of an account of its own."""
    name = f"{uuid.uuid4().hex}/"
    return scheduler_v1.AccountLimits(account=name, **({"tokens_per_minute": PER_MINUTE} | limits))  # type: ignore[arg-type]


def issued(started: float, per_minute: int = PER_MINUTE) -> int:
    """The most tokens that a bucket has issued since it was first used."""
    return per_minute + math.ceil((time.monotonic() - started) * per_minute / 60)


def cost(session: SessionClient, submits: Iterable[scheduler_v1.Submit]) -> int:
    """What was delivered: the tokens, and the prompts of requests that have any."""
    counts = [len(session.tokens(submit.key)) for submit in submits]
    return sum(len(PROMPT) + count for count in counts if count)


def ended(session: SessionClient, submit: scheduler_v1.Submit) -> bool:
    return len(session.tokens(submit.key)) == submit.max_tokens


async def until_spent(
    session: SessionClient, submits: Sequence[scheduler_v1.Submit], num_tokens: int, started: float
) -> None:
    """Waits until so many tokens are delivered; asserts that the bucket has always issued as many."""
    async with asyncio.timeout(TIMEOUT):
        while cost(session, submits) < num_tokens:
            await session.read()
            assert cost(session, submits) <= issued(started)


async def until_paused(at: Deployment, *keys: str) -> None:
    """Waits until all sequences of these requests wait for tokens of their account."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            found = [at.engine.explain(key) for key in keys]
            states = {one.status.name for each in found if each is not None for one in each.sequences}
            if states == {"WAITING_FOR_TOKENS"}:
                return
            await asyncio.sleep(0.01)


async def test_a_key_gets_its_tokens_and_pauses_and_others_do_not_wait(
    running: Deployment, session: SessionClient
) -> None:
    limits, started = account(), time.monotonic()
    limited = [await session.submit(max_tokens=200, limits=limits) for _ in range(4)]
    await until_spent(session, limited, PER_MINUTE - 2 * (PER_MINUTE // LEASE_SHARE), started)
    await until_paused(running, *(submit.key for submit in limited if not ended(session, submit)))
    other = await session.submit(max_tokens=200)
    assert await session.until_tokens(other.key, 200) == expected(200)
    assert cost(session, limited) <= issued(started)
    submit = next(submit for submit in limited if len(session.tokens(submit.key)) < 200)  # the oldest is served first
    tokens = await session.until_tokens(submit.key, min(200, len(session.tokens(submit.key)) + 20))
    assert tokens == expected(len(tokens))


async def test_a_deadline_before_the_budget_is_refilled_fails_with_when_to_try_again(session: SessionClient) -> None:
    limits = account(tokens_per_minute=60)
    first = await session.submit(prompt_token_ids=range(55), max_tokens=1, limits=limits)
    await session.until(first.key, "tokens")
    time_left = Duration(seconds=8)  # what the next one needs to start is there after about 22 s
    late = await session.submit(max_tokens=100, limits=limits, time_left=time_left)
    refusal = (await session.until(late.key, "failed")).failed
    assert refusal.reason == scheduler_v1.FAILURE_REASON_DEADLINE_INFEASIBLE
    assert "tokens_per_minute of the key, 60" in refusal.message
    assert refusal.HasField("retry_after")


async def test_without_redis_a_limited_key_uses_up_its_lease_and_continues_when_it_is_back(
    running: Deployment, session: SessionClient, redis_server: RedisServer
) -> None:
    limited = await session.submit(max_tokens=200, limits=account())
    await session.until_tokens(limited.key, 1)
    redis_server.kill()
    other = await session.submit(max_tokens=200)
    assert await session.until_tokens(other.key, 200) == expected(200)
    await until_paused(running, limited.key)
    assert len(session.tokens(limited.key)) < 100
    redis_server.start()
    assert await session.until_tokens(limited.key, 200) == expected(200)


async def test_a_crash_forfeits_one_lease_and_no_token_is_delivered_beyond_the_budget(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    limits, started = account(), time.monotonic()
    endless = Graces(detached=3600, broken=3600, taken_over=3600, unclaimed=7200)
    async with candidate(redis_url, [worker.port]) as first:
        await first.until_leading()
        async with first.session() as session:
            await session.ready()
            submits = [await session.submit(max_tokens=200, limits=limits) for _ in range(4)]
            await until_spent(session, submits, PER_MINUTE // 2, started)
            worker.gate.clear()
            before = [session.tokens(submit.key) for submit in submits]
            await first.crash()
            worker.gate.set()
            async with scheduler(redis_url, [worker.port], graces=endless) as second, second.session() as anew:
                for submit, tokens in zip(submits, before, strict=True):
                    unflushed = scheduler_v1.UnflushedTokens(index=0, offset=0, token_ids=tokens)
                    assert (await anew.attach(submit.key, unflushed)).HasField("attached")
                # The first one's lease is lost, and the second one's is too small for another sequence.
                await until_spent(anew, submits, PER_MINUTE - 2 * (PER_MINUTE // LEASE_SHARE), started)


async def test_the_cost_of_a_prompt_is_recorded_and_what_was_spent_is_shown(
    session: SessionClient, store: RedisStore, redis_url: str
) -> None:
    limits = account(cached_token_factor=0.5)
    submit = await session.submit(max_tokens=8, n=2, limits=limits)
    await session.until_tokens(submit.key, 8)
    log = await until_recorded(store, submit.key, State.FINISHED)
    assert log.prompt_cost == len(PROMPT)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        key = "{quire}:bucket:tokens:" + sha256(limits.account.encode()).hexdigest()
        async with asyncio.timeout(TIMEOUT):
            while client.hget(key, "spent") != str(len(PROMPT) + 2 * 8):
                await asyncio.sleep(0.01)
            while float(client.hget(key, "level") or 0) < PER_MINUTE - len(PROMPT) - 2 * 8:  # the rest is returned
                await asyncio.sleep(0.01)


async def test_a_prompt_is_not_charged_again_by_the_next_leader(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    """The first leader dies while the prompt is computed: no token shows that it was paid."""
    limits = account()
    async with candidate(redis_url, [worker.port]) as first:
        await first.until_leading()
        async with first.session() as session:
            await session.ready()
            worker.gate.clear()
            submit = await session.submit(max_tokens=8, limits=limits)
            async with asyncio.timeout(TIMEOUT):
                while (log := await store.read(submit.key)) is None or log.prompt_cost != len(PROMPT):
                    await asyncio.sleep(0.01)
            assert not log.sequences[0].token_ids
            await first.crash()
            worker.gate.set()
    async with scheduler(redis_url, [worker.port]) as second, second.session() as anew:
        assert (await anew.attach(submit.key)).HasField("attached")
        assert await anew.until_tokens(submit.key, 8) == expected(8)
        async with asyncio.timeout(TIMEOUT):
            while not (spent := [budget.spent for budget in second.engine.budgets]):
                await asyncio.sleep(0.01)
        assert spent == [8]


async def test_a_prompt_beyond_the_budget_is_rejected(session: SessionClient) -> None:
    submit = await session.submit(limits=account(tokens_per_minute=len(PROMPT)))
    answer = await session.answer(submit.command_id)
    assert answer.failed.reason == scheduler_v1.FAILURE_REASON_PROMPT_TOO_COSTLY
    assert "tokens_per_minute" in answer.failed.message
    fitting = await session.submit(max_tokens=1, limits=account(tokens_per_minute=len(PROMPT) + 1))
    assert await session.until_tokens(fitting.key, 1) == expected(1)


async def test_requests_beyond_requests_per_minute_are_rejected_with_a_time(
    running: Deployment, session: SessionClient, redis_server: RedisServer
) -> None:
    limits = account(tokens_per_minute=None, requests_per_minute=4)
    submits = [await session.submit(limits=limits) for _ in range(5)]
    answers = [await session.answer(submit.command_id) for submit in submits]
    assert [answer.WhichOneof("kind") for answer in answers] == ["accepted"] * 4 + ["failed"]
    failed = answers[-1].failed
    assert failed.reason == scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA
    assert "requests_per_minute" in failed.message
    assert 1 <= failed.retry_after.seconds <= 15
    await session.until(submits[0].key, "tokens")
    again = scheduler_v1.Submit()
    again.CopyFrom(submits[0])
    again.command_id = 99
    await session.send(submit=again)  # a repetition is no request
    assert (await session.answer(99)).HasField("attached")
    other = await session.submit(limits=account(tokens_per_minute=None, requests_per_minute=4))
    assert (await session.answer(other.command_id)).HasField("accepted")
    redis_server.kill()
    unknown = await session.submit(limits=account(tokens_per_minute=None, requests_per_minute=4))
    answer = await session.answer(unknown.command_id)
    assert answer.failed.reason == scheduler_v1.FAILURE_REASON_STORE_DEGRADED
