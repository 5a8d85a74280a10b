"""Records of requests as gateways read and remove them, and requests that run in the background."""

import asyncio
from functools import partial

import pytest
import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_harness import (
    PROMPT,
    Deployment,
    Worker,
    candidate,
    expected,
    idle,
    scheduler,
    until_over,
    until_recorded,
)
from scheduler_svc import journal, record_commands
from scheduler_svc.attachment_room import AttachmentRoom
from scheduler_svc.live_state import Graces
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore
from svc_common.attachments import MAX_ATTACHMENT_BYTES

UNKNOWN = scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST
CANCELLED = scheduler_v1.FAILURE_REASON_CANCELLED
GRACE = 0.05  # seconds
AT_ONCE = Graces(taken_over=0.05)
HALF = 100  # tokens


async def test_a_background_request_runs_to_its_end_without_a_gateway(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    async with scheduler(redis_url, [worker.port], detach_grace=GRACE) as running:
        async with running.session() as session:
            await session.ready()
            worker.gate.clear()
            kept = await session.submit(detachable=True, is_background=True)
            cancelled = await session.submit(detachable=True)
            await session.answer(cancelled.command_id)
        await until_over(running.engine, cancelled.key)  # for both the grace has passed
        assert running.engine.is_live(kept.key)
        worker.gate.set()
        log = await until_recorded(store, kept.key, State.FINISHED)
        assert log.sequences[0].token_ids == expected(8)
        await idle(running.engine)


async def test_a_background_request_survives_its_gateway_and_its_scheduler(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    async with candidate(redis_url, [worker.port], detach_grace=GRACE) as first:
        await first.until_leading()
        async with first.session() as session:
            await session.ready()
            submit = await session.submit(detachable=True, is_background=True, max_tokens=2 * HALF)
            await session.until_tokens(submit.key, HALF)
            worker.gate.clear()
            await first.crash()
    async with scheduler(redis_url, [worker.port], graces=AT_ONCE, detach_grace=GRACE):
        worker.gate.set()
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].token_ids == expected(2 * HALF)


async def test_a_record_is_read_while_its_request_runs_and_after_its_end(
    running: Deployment, worker: Worker, store: RedisStore
) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(detachable=True, attachment=b"items", max_tokens=200)
        await session.until_tokens(submit.key, 5)
        worker.gate.clear()
        record = (await session.look_up(submit.key)).record
        assert (record.attachment, record.HasField("ended_at"), record.HasField("failed")) == (b"items", False, False)
        [tokens] = record.attached.sequences
        assert len(tokens.token_ids) >= 5
        assert tokens.token_ids == expected(len(tokens.token_ids))
        assert (record.attached.prompt_length, record.attached.detachable) == (len(PROMPT), True)
        worker.gate.set()
        await session.until(submit.key, "tokens")
        await until_recorded(store, submit.key, State.FINISHED)
    async with running.session() as session:
        record = (await session.look_up(submit.key)).record
        assert (record.attachment, record.HasField("ended_at"), record.HasField("failed")) == (b"items", True, False)
        [tokens] = record.attached.sequences
        assert (list(tokens.token_ids), tokens.end.WhichOneof("cause")) == (expected(200), "length")
    assert not running.engine.is_live(submit.key)


@pytest.mark.parametrize("where", ["here", "store"])
async def test_a_record_of_a_cancelled_request_has_its_tokens_and_the_reason(
    running: Deployment, worker: Worker, store: RedisStore, where: str
) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(detachable=True, max_tokens=200)
        await session.until_tokens(submit.key, 5)
        worker.gate.clear()
        await session.send(cancel=scheduler_v1.Cancel(key=submit.key))
        if where == "store":
            await until_recorded(store, submit.key, State.CANCELLED)
        record = (await session.look_up(submit.key)).record
        assert (record.failed.reason, record.HasField("ended_at")) == (CANCELLED, True)
        [tokens] = record.attached.sequences
        assert len(tokens.token_ids) >= 5
        assert tokens.token_ids == expected(len(tokens.token_ids))


async def test_reading_a_request_does_not_subscribe_to_it(running: Deployment, worker: Worker) -> None:
    async with running.session() as first, running.session() as second:
        await first.ready()
        submit = await first.submit(detachable=False, max_tokens=200)
        await first.until_tokens(submit.key, 5)
        worker.gate.clear()
        assert (await second.look_up(submit.key)).HasField("record")
        await first.send(detach=scheduler_v1.Detach(key=submit.key))
        await until_over(running.engine, submit.key)
        assert second.kinds(submit.key) == ["record"]


async def test_a_look_up_without_a_reader_has_only_what_the_store_has(
    running: Deployment, worker: Worker, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_MAX_LAG", 60.0)
    monkeypatch.setattr(record_commands, "_MAX_WAIT", 60.0)
    async with running.session() as session, running.session() as reader:
        await session.ready()
        submit = await session.submit(detachable=True, is_background=True, max_tokens=200)
        await session.until_tokens(submit.key, 5)
        async with running.engine.journal.paused():
            await session.until_tokens(submit.key, 100)
            worker.gate.clear()
            assert len((await reader.look_up(submit.key)).record.attached.sequences[0].token_ids) >= 100
            await session.send(detach=scheduler_v1.Detach(key=submit.key))
            looking_up = asyncio.create_task(session.look_up(submit.key))
            await asyncio.wait([looking_up], timeout=0.2)
            assert not looking_up.done()
        record = (await looking_up).record
        log = await store.read(submit.key)
        assert log is not None
        shown = record.attached.sequences[0].token_ids
        assert log.sequences[0].token_ids[: len(shown)] == shown
        worker.gate.set()


async def test_unknown_requests_are_neither_read_nor_removed(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        for answer in (await session.look_up("no such key"), await session.delete("no such key")):
            assert answer.failed.reason == UNKNOWN


async def test_a_removed_request_is_gone_from_redis_and_from_the_scheduler(
    running: Deployment, store: RedisStore, redis_url: str
) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(detachable=True, attachment=b"items")
        await session.until(submit.key, "tokens")
        await until_recorded(store, submit.key, State.FINISHED)
        assert (await session.delete(submit.key)).HasField("deleted")
        with redis.Redis.from_url(redis_url) as client:
            assert list(client.scan_iter(f"*{submit.key}*")) == []
        for answer in (await session.look_up(submit.key), await session.delete(submit.key)):
            assert answer.failed.reason == UNKNOWN


async def test_removing_a_live_request_cancels_it_and_nothing_of_it_is_written_again(
    running: Deployment, worker: Worker, redis_url: str
) -> None:
    async with running.session() as session, running.session() as other:
        await session.ready()
        submit = await session.submit(detachable=True, is_background=True, max_tokens=200)
        await session.until_tokens(submit.key, 5)
        worker.gate.clear()
        assert (await other.delete(submit.key)).HasField("deleted")
        assert (await session.until(submit.key, "failed")).failed.reason == CANCELLED
        assert not running.engine.is_live(submit.key)
        assert (await session.look_up(submit.key)).failed.reason == UNKNOWN
        worker.gate.set()
        # What is written of a later request would be written of this one too.
        later = await session.submit(detachable=True)
        await session.until(later.key, "tokens")
        assert await running.engine.journal.flush(60)
        with redis.Redis.from_url(redis_url) as client:
            assert list(client.scan_iter(f"*{submit.key}*")) == []
            assert not client.sismember("{quire}:live", submit.key)
        again = await session.submit(key=submit.key, detachable=True)
        assert (await session.answer(again.command_id)).HasField("accepted")
        await until_over(running.engine, submit.key)


async def test_a_request_that_is_not_recorded_can_be_read_and_removed_while_it_runs(
    running: Deployment, worker: Worker
) -> None:
    retention = scheduler_v1.Retention(is_unrecorded=True)
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(detachable=True, retention=retention, attachment=b"items", max_tokens=200)
        await session.until_tokens(submit.key, 5)
        worker.gate.clear()
        assert (await session.look_up(submit.key)).record.attachment == b"items"
        assert (await session.delete(submit.key)).HasField("deleted")
        assert (await session.look_up(submit.key)).failed.reason == UNKNOWN


async def test_an_attachment_that_is_too_large_is_refused(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(attachment=bytes(MAX_ATTACHMENT_BYTES + 1))
        answer = await session.answer(submit.command_id)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_INVALID
        submit = await session.submit(attachment=bytes(MAX_ATTACHMENT_BYTES))
        assert (await session.answer(submit.command_id)).HasField("accepted")
        await asyncio.wait_for(session.until(submit.key, "tokens"), 60)


async def test_attachments_of_live_requests_have_a_bound_in_memory(
    redis_url: str, worker: Worker, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.live_requests.AttachmentRoom", partial(AttachmentRoom, 100))
    async with scheduler(redis_url, [worker.port]) as running, running.session() as session:
        await session.ready()
        worker.gate.clear()
        first = await session.submit(attachment=bytes(60))
        assert (await session.answer(first.command_id)).HasField("accepted")
        again = await session.submit(key=first.key, submission_id=first.submission_id, attachment=bytes(60))
        assert (await session.answer(again.command_id)).HasField("accepted")
        second = await session.submit(attachment=bytes(41))
        answer = await session.answer(second.command_id)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        assert answer.failed.retry_after.seconds
        assert await store.read(second.key) is None
        worker.gate.set()
        await until_recorded(store, first.key, State.FINISHED)
        assert await running.engine.journal.flush(60)
        third = await session.submit(attachment=bytes(41))
        assert (await session.answer(third.command_id)).HasField("accepted")
