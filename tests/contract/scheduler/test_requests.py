"""Requests of one session, from Submit to their end."""

import asyncio
import subprocess
import sys
import uuid
from itertools import pairwise
from pathlib import Path

import pytest
import redis
from google.protobuf.duration_pb2 import Duration

from checksum_service import VOCAB
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_harness import (
    PROMPT,
    TIMEOUT,
    Deployment,
    Worker,
    expected,
    finish_of,
    idle,
    until_over,
    until_recorded,
)
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.redis import RedisStore


async def test_request_is_accepted_and_all_its_tokens_come(running: Deployment) -> None:
    async with running.session() as session:
        model = await session.ready()
        assert (model.name, model.context_length, model.vocab_size) == ("checksum", 256, VOCAB)
        submit = await session.submit(n=2)
        answer = await session.answer(submit.command_id)
        assert answer.accepted.is_durable
        ends: dict[int, scheduler_v1.SequenceEnd] = {}
        while len(ends) < 2:
            await session.read()
            ends = {e.tokens.index: e.tokens.end for e in session.events if e.tokens.HasField("end")}
        for index in range(2):
            assert session.tokens(submit.key, index) == expected(8)
            assert ends[index].WhichOneof("cause") == "length"
        assert set(session.epochs) == {running.engine.epoch}
    await idle(running.engine)


async def test_stop_token_is_named_at_the_end(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(stop_token_ids=[expected(4)[3]])
        event = await session.until(submit.key, "tokens")
        assert event.tokens.end.stop_token_id == expected(4)[3]
        assert session.tokens(submit.key) == expected(4)


async def test_cancel_ends_a_request_on_any_session(running: Deployment) -> None:
    async with running.session() as session, running.session() as other:
        await session.ready()
        submit = await session.submit(max_tokens=200)
        await session.until(submit.key, "accepted")
        await other.send(cancel=scheduler_v1.Cancel(key=submit.key))
        event = await session.until(submit.key, "failed")
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED
        assert not event.HasField("command_id")
        await idle(running.engine)


async def test_a_cancellation_that_is_sent_again_ends_no_request_that_was_accepted_since(
    running: Deployment, worker: Worker
) -> None:
    worker.gate.clear()
    async with running.session() as session, running.session() as other:
        await session.ready()
        submit = await session.submit()
        await session.until(submit.key, "accepted")
        await other.send(cancel=scheduler_v1.Cancel(key=submit.key, sent_ago=Duration(seconds=2)))
        later = await other.submit()  # the cancellation has been handled when this one is answered
        await other.answer(later.command_id)
        assert running.engine.is_live(submit.key)
        await other.send(cancel=scheduler_v1.Cancel(key=submit.key, sent_ago=Duration()))
        event = await session.until(submit.key, "failed")
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED


async def test_deadline_ends_a_request(running: Deployment, worker: Worker) -> None:
    worker.gate.clear()
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(time_left=Duration(nanos=50_000_000))
        event = await session.until(submit.key, "failed")
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_DEADLINE_EXCEEDED
    worker.gate.set()
    await idle(running.engine)


async def test_record_is_there_from_acceptance_on_and_expires(running: Deployment, store: RedisStore) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit()
        await session.until(submit.key, "accepted")
        recorded = await store.read(submit.key)
        assert recorded is not None
        assert recorded.submit == submit
        await session.until(submit.key, "tokens")
    log = await until_recorded(store, submit.key, State.FINISHED)
    assert log.sequences[0].token_ids == expected(8)


async def test_every_key_in_the_store_expires(running: Deployment, store: RedisStore, redis_url: str) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit()
        await session.until(submit.key, "tokens")
        await until_recorded(store, submit.key, State.FINISHED)
    with redis.Redis.from_url(redis_url) as client:
        assert [key for key in client.scan_iter() if client.ttl(key) < 0] == []


async def test_repeated_submission_is_taken_once(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=100)
        submit.command_id += 1
        await session.send(submit=submit)
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == expected(100)
        assert session.kinds(submit.key) in (["accepted", "accepted"], ["accepted", "attached"])


async def test_another_request_under_a_live_key_is_refused_and_the_first_continues(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=100)
        second = await session.submit(key=submit.key)
        answer = await session.answer(second.command_id)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_KEY_IN_USE
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == expected(100)


async def test_another_request_under_the_key_of_a_finished_one_is_refused(
    running: Deployment, store: RedisStore
) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit()
        await session.until(submit.key, "tokens")
        for _ in range(2):  # once from the scheduler's memory, once from the store
            answer = await session.answer((await session.submit(key=submit.key)).command_id)
            assert answer.failed.reason == scheduler_v1.FAILURE_REASON_KEY_IN_USE
            await until_recorded(store, submit.key, State.FINISHED)
            await session.until((await session.submit()).key, "tokens")


async def test_key_of_a_cancelled_request_is_free(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=200)
        await session.send(cancel=scheduler_v1.Cancel(key=submit.key))
        await session.until(submit.key, "failed")
        second = await session.submit(key=submit.key, prompt_token_ids=[5, *PROMPT])
        assert (await session.answer(second.command_id)).HasField("accepted")
        await session.until(submit.key, "tokens")


async def test_failed_row_fails_its_request_alone(running: Deployment, worker: Worker) -> None:
    async with running.session() as session:
        await session.ready()
        worker.failing_token = 999
        bad, good = await session.submit(prompt_token_ids=[999, *PROMPT]), await session.submit()
        event = await session.until(bad.key, "failed")
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_INTERNAL
        assert "scripted failure" not in event.failed.message
        await session.until(good.key, "tokens")


async def test_stop_strings_pause_until_acknowledged_and_finish_cuts(running: Deployment, store: RedisStore) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=200, has_stop_strings=True)
        await session.until_tokens(submit.key, 64)
        await session.send(acknowledge=scheduler_v1.Acknowledge(key=submit.key, index=0, num_tokens=30))
        await session.until_tokens(submit.key, 94)
        finish = finish_of(submit, 80)
        await session.send(finish=finish_of(submit, 70, submission_id="another's"))
        await session.send(finish=finish)
        await until_over(running.engine, submit.key)
        await session.send(finish=finish)
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].token_ids == expected(80)
        assert log.sequences[0].end is not None
        assert log.sequences[0].end.HasField("stop_string")
    await idle(running.engine)


async def test_a_stop_match_after_the_end_truncates_the_record(running: Deployment, store: RedisStore) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(has_stop_strings=True)
        await session.until(submit.key, "tokens")
        await session.send(finish=finish_of(submit, 5))
        await session.send(finish=finish_of(submit, 4, submission_id="another's"))
        answer = await session.attach(submit.key)
        assert answer.attached.sequences[0].token_ids == expected(5)
        assert answer.attached.sequences[0].end.HasField("stop_string")
        await running.engine.journal.flush(10)
        log = await store.read(submit.key)
        assert log is not None
        assert log.sequences[0].token_ids == expected(5)


async def test_one_session_cannot_end_what_another_submitted(running: Deployment, worker: Worker) -> None:
    worker.gate.clear()
    async with running.session() as session, running.session() as other:
        await session.ready()
        submit = await session.submit(detachable=True, max_tokens=20)
        await session.until(submit.key, "accepted")
        refused = await other.submit(key=submit.key)
        await other.send(detach=scheduler_v1.Detach(key=submit.key))
        await other.send(finish=finish_of(submit, 0))
        await other.send(cancel=scheduler_v1.Cancel(key=submit.key, submission_id=refused.submission_id))
        event = await other.answer(refused.command_id)
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_KEY_IN_USE
        marker = await other.submit(max_tokens=1)
        await other.until(marker.key, "accepted")  # the commands before it were handled
        worker.gate.set()
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == expected(20)


async def test_slow_store_holds_up_its_request_and_nothing_else(
    running: Deployment, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, is_answering = running.store.put, asyncio.Event()

    async def slow(log: RequestLog, epoch: int) -> RequestLog | None:
        await is_answering.wait()
        return await put(log, epoch)

    worker.gate.clear()
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=200)
        await session.until(submit.key, "accepted")
        monkeypatch.setattr(running.store, "put", slow)
        waiting = await session.submit()
        await session.send(cancel=scheduler_v1.Cancel(key=submit.key))
        await session.until(submit.key, "failed")
        worker.gate.set()
        assert not any(event.key == waiting.key for event in session.events)
        is_answering.set()
        await session.until(waiting.key, "tokens")


async def test_commands_about_a_request_wait_for_its_acceptance(running: Deployment, redis_url: str) -> None:
    async with running.session() as session:
        await session.ready()
        with redis.Redis.from_url(redis_url) as client:
            client.client_pause(300)
        submit = await session.submit(max_tokens=200)
        await session.send(cancel=scheduler_v1.Cancel(key=submit.key))
        event = await session.until(submit.key, "failed")
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED
        assert session.kinds(submit.key) == ["accepted", "failed"]
    await idle(running.engine)


async def test_durable_tokens_are_reported_in_strides(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=200, has_stop_strings=True)  # it pauses 64 tokens ahead of its gateway
        for num_tokens in range(64, 201, 8):
            await session.send(acknowledge=scheduler_v1.Acknowledge(key=submit.key, num_tokens=num_tokens - 64))
            await session.until_tokens(submit.key, num_tokens)
            if num_tokens == 200:
                break  # it has ended, which includes the rest
            assert await running.engine.journal.flush(TIMEOUT)
            await session.attach("nobody's")  # the earlier messages have arrived
            counts = [e.durable.num_tokens for e in session.events if e.HasField("durable")]
            assert num_tokens - 32 < counts[-1] <= num_tokens
            assert all(later - earlier >= 32 for earlier, later in pairwise([0, *counts]))


async def test_the_end_of_each_sequence_is_reported_as_durable(running: Deployment) -> None:
    """Gateways keep the last tokens until then."""
    async with running.session() as session:
        await session.ready()
        await session.submit(max_tokens=9, n=2)
        ends = {0: 9, 1: 9}
        async with asyncio.timeout(TIMEOUT):
            while {e.durable.index: e.durable.num_tokens for e in session.events if e.HasField("durable")} != ends:
                await session.read()


async def test_a_session_without_events_gets_heartbeats(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        while session.num_empty < 3:
            await session.read()
        assert session.events == []


async def test_a_refused_request_is_not_recorded(running: Deployment, store: RedisStore) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=1000)
        answer = await session.answer(submit.command_id)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED
        await running.engine.journal.flush(10)
        assert await store.read(submit.key) is None


async def test_a_malformed_request_is_refused_and_costs_nobody_else(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        bad = await session.submit(prompt_token_ids=[], key=uuid.uuid4().hex)
        answer = await session.answer(bad.command_id)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_INVALID
        good = await session.submit()
        await session.until(good.key, "tokens")


def test_core_imports_nothing_that_waits(tmp_path: Path) -> None:
    code = (
        "import sys, scheduler_svc.core.scheduler;"
        "sys.exit(bool({'grpc', 'asyncio', 'redis', 'torch', 'google.protobuf'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
