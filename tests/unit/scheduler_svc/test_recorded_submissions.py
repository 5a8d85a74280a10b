"""Records of submissions: where the store has lost or cannot take them, and of requests that cannot be started."""

import asyncio
from functools import partial

import pytest
import redis

from commands_bench import (
    bench,
    lose_everything,
    named,
    unrecorded,
    until,
)
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.base import DeletedSubmission, MalformedRecord, StoreUnavailable


async def test_a_request_that_waits_is_recorded_again_where_the_store_has_lost_it(url: str) -> None:
    """Nothing of it changes meanwhile that would be written, and its client may have left."""
    async with bench(url) as on:
        accepted = (await on.submit("first")).accepted
        assert accepted.is_durable
        lose_everything(url)
        async with asyncio.timeout(60):
            while (record := await on.store.read("k")) is None:
                await asyncio.sleep(0.01)
        assert (record.submit.submission_id, record.state) == ("first", State.ACCEPTED)


async def test_a_request_that_was_taken_over_is_recorded_again_where_the_store_has_lost_it(url: str) -> None:
    async with bench(url) as before:
        await before.submit("first")
    async with bench(url) as on:
        for log in await on.store.live():
            on.requests.take_over(log)
        lose_everything(url)
        async with asyncio.timeout(60):
            while await on.store.read("k") is None:
                await asyncio.sleep(0.01)


async def test_a_record_of_a_later_release_is_neither_resumed_nor_overwritten(url: str) -> None:
    async with bench(url) as on:
        await on.submit("first")
        assert await on.journal.flush(20)
    with redis.Redis.from_url(url) as keys:
        keys.hset("{quire}:request:k", "version", 99)
        async with bench(url) as after:
            for answer in (await after.attach(), await after.submit("second")):
                assert answer.failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
                assert "a record of version 99" in answer.failed.message
            assert after.requests.get("k") is None
        assert keys.hget("{quire}:request:k", "version") == b"99"


async def test_the_record_of_a_request_whose_tokens_do_not_fit_ends(url: str) -> None:
    """The store has lost its first tokens, and its gateway has later ones only."""
    beyond = scheduler_v1.UnflushedTokens(index=0, offset=4, token_ids=[7])
    async with bench(url) as on:
        on.ask(submit=named(was_accepted=True, unflushed=[beyond]))
        await until(lambda: 7 in on.answers)
        assert on.answers[7].failed.reason == scheduler_v1.FAILURE_REASON_DIVERGED
        assert await on.journal.flush(20)
        assert await on.store.live() == []
        record = await on.store.read("k")
        assert record is not None
        assert (record.state, record.failure) == (State.FAILED, scheduler_v1.FAILURE_REASON_DIVERGED)


@pytest.mark.parametrize("broken", ["unflushed_tokens.merge", "commands.accepted_to_proto"])
async def test_the_record_of_a_request_that_cannot_be_started_ends(
    broken: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_failed = 0

    def fail(*_: object) -> None:
        nonlocal num_failed
        num_failed += 1
        raise ValueError

    async with bench(url) as on:
        with monkeypatch.context() as patches:
            patches.setattr(f"scheduler_svc.{broken}", fail)
            on.ask(submit=named())
            await until(lambda: bool(num_failed and not on.commands._queues._tasks))
        assert not on.core.is_live("k")
        assert on.requests.get("k") is None
        assert await on.journal.flush(20)
        assert await on.store.live() == []


async def test_a_refused_request_is_not_recorded_by_a_call_that_arrives_late(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[tuple[RequestLog, int]] = []

    async def put(log: RequestLog, epoch: int) -> None:
        late.append((log, epoch))
        raise StoreUnavailable("it took too long to answer")

    async with bench(url, needs_store=True) as on:
        with monkeypatch.context() as patches:
            patches.setattr(on.store, "put", put)
            on.ask(submit=named())
            await until(lambda: 7 in on.answers)
        assert on.answers[7].failed.reason == scheduler_v1.FAILURE_REASON_STORE_DEGRADED
        assert await on.journal.flush(20)
        with pytest.raises(DeletedSubmission):
            await on.store.put(*late[0])
        assert await on.store.live() == []
        assert (await on.submit("another")).accepted.is_durable


@pytest.mark.parametrize("error", [StoreUnavailable("away"), MalformedRecord("malformed"), ValueError()], ids=repr)
async def test_a_request_that_cannot_be_recorded_does_not_count(
    error: Exception, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put(*_: object) -> None:
        raise error

    account = scheduler_v1.AccountLimits(account="t/", requests_per_minute=1)
    async with bench(url, needs_store=True) as on:
        for command_id, is_refused in ((1, True), (2, True), (3, False), (4, True)):
            with monkeypatch.context() as patches:
                if command_id < 3:
                    patches.setattr(on.store, "put", put)
                submission = f"submission {command_id}"
                fields = {"key": submission, "submission_id": submission, "command_id": command_id}
                on.ask(submit=unrecorded(retention=None, limits=account, **fields))
                await until(partial(on.answers.__contains__, command_id))
            assert on.answers[command_id].HasField("failed") is is_refused
