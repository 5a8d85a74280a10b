"""The contents of one call of the journal, and conflicts with the record of another submission."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis

from journals import EPOCH, JournalCallbacks, at_work, journal_of, read, whole
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from redis_server import RedisServer
from request_logs import end, logprobs, request_log
from scheduler_svc.journal import Journal
from scheduler_svc.request_log import RecordState, RequestLog, State
from scheduler_svc.store.base import Ending, Gap, KeyTaken, StoreUnavailable, WriteBatch
from scheduler_svc.store.redis import RedisStore


class Batches(RedisStore):
    """A store that records the size of each call, and fails on demand."""

    def __init__(self, url: str) -> None:
        super().__init__(url, 500)
        self.url = url
        self.sizes: list[tuple[int, int]] = []  # prompt tokens, and output tokens
        self.attachments: list[int] = []  # bytes
        self.num_failures = 0

    async def write(self, batch: WriteBatch, epoch: int) -> list[Gap | KeyTaken]:
        prompts = sum(len(log.submit.prompt_token_ids) for log in batch.records)
        self.sizes.append((prompts, sum(len(write.token_ids) for write in batch.writes)))
        self.attachments.append(sum(len(log.submit.attachment) for log in batch.records))
        if self.num_failures:
            self.num_failures -= 1
            raise StoreUnavailable("scripted failure")
        return await super().write(batch, epoch)


@pytest.fixture
async def batches(lasting: RedisServer) -> AsyncIterator[Batches]:
    store = Batches(lasting.url)
    yield store
    await store.close()


async def test_what_gathered_is_written_in_calls_of_bounded_size(batches: Batches, callbacks: JournalCallbacks) -> None:
    journal = journal_of(batches, callbacks)
    plain, scored = request_log(), request_log(n=2)
    plain.sequences[0].token_ids = [*range(40_000)]
    for sequence in scored.sequences:
        sequence.token_ids = [*range(9000)]
        sequence.logprobs = logprobs(*range(9000))  # of two tokens each
        sequence.score = -1.0
    for log in (plain, scored):
        end(log)
        journal.mark_changed(log)
    assert await journal.flush(60)
    assert max(size for _, size in batches.sizes) <= 16384
    assert len(batches.sizes) == 6  # 40,000 tokens of one weight, 18,000 of three, and two logs
    for log in (plain, scored):
        found = await read(batches, log)
        assert found.state is State.FINISHED
        assert found.sequences == log.sequences
        assert log.is_durable


async def test_attachments_and_requested_log_probabilities_count(batches: Batches, callbacks: JournalCallbacks) -> None:
    """After a restart of the store all requests are recorded anew, with what they have by then."""
    journal, logs = journal_of(batches, callbacks), [request_log() for _ in range(3)]
    for log in logs:
        log.submit.attachment = bytes(200_000)
        log.sequences[0].token_ids = [*range(300)]
        log.sequences[0].logprobs = [worker_v1.TokenLogprobs(requested=[-1.0] * 128)] * 300
        journal.mark_changed(log)
    assert await journal.flush(60)
    assert max(batches.attachments) == 200_000
    assert max(size for _, size in batches.sizes) <= 16384 // 64
    assert [(await read(batches, log)).sequences for log in logs] == [log.sequences for log in logs]


async def test_a_deleted_request_is_not_kept(batches: Batches, callbacks: JournalCallbacks) -> None:
    """Those that ended are kept for some seconds, in case that the store loses its latest writes."""
    journal, log = journal_of(batches, callbacks), request_log()
    end(log)
    journal.mark_changed(log)
    assert await journal.flush(60)
    assert await journal.remove(log.key)
    assert not journal._ended


async def test_log_probabilities_of_a_prompt_are_whole_before_its_first_token(
    batches: Batches, callbacks: JournalCallbacks
) -> None:
    """However many calls they take."""
    journal, log = journal_of(batches, callbacks), request_log()
    log.prompt_logprobs = logprobs(*range(12_000))  # of two tokens each
    log.sequences[0].token_ids = [*range(100)]
    log.fingerprint = b"f"
    end(log)
    journal.mark_changed(log)
    while not batches.sizes or not batches.sizes[-1][1]:
        if batches.sizes:
            found = await read(batches, log)
            assert (found.sequences[0].token_ids, found.sequences[0].end) == ([], None)
            assert found.state is State.ACCEPTED
        await journal._write()
    assert len(batches.sizes) == 3
    assert await journal.flush(60)
    found = await read(batches, log)
    assert found.prompt_logprobs == log.prompt_logprobs
    assert (found.sequences, found.state, found.fingerprint) == (log.sequences, State.FINISHED, b"f")
    assert log.is_durable


async def test_log_probabilities_that_the_store_lost_are_written_anew(
    batches: Batches, callbacks: JournalCallbacks
) -> None:
    journal, log = journal_of(batches, callbacks), request_log()
    log.prompt_logprobs = logprobs(-1.0, -2.0)
    journal.mark_changed(log)
    assert await journal.flush(60)
    with redis.Redis.from_url(batches.url) as keys:
        keys.delete(*keys.scan_iter("*:prompt_logprobs"))
    gain(journal, log)
    assert await journal.flush(60)
    found = await read(batches, log)
    assert found.prompt_logprobs == log.prompt_logprobs
    assert found.sequences[0].token_ids == [0]


def gain(journal: Journal, log: RequestLog, num_tokens: int = 1) -> None:
    """A step commits the first tokens of a request."""
    log.sequences[0].token_ids.extend(range(num_tokens))
    journal.mark_changed(log)


@pytest.fixture
def endless_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a step cause no second call."""
    monkeypatch.setattr("scheduler_svc.journal._MIN_INTERVAL", 3600.0)


@pytest.mark.usefixtures("endless_pace")
async def test_steps_that_follow_each_other_quickly_share_a_call(batches: Batches, callbacks: JournalCallbacks) -> None:
    journal, log = journal_of(batches, callbacks), request_log()
    async with at_work(journal):
        gain(journal, log)
        await whole(journal, log)  # what comes first does not wait
        for _ in range(5):
            gain(journal, log)
            await asyncio.sleep(0.02)
        assert await journal.flush(60)
    assert [size for _, size in batches.sizes] == [1, 5]


async def test_what_waits_for_more_of_it_is_written_when_the_pace_is_over(
    batches: Batches, callbacks: JournalCallbacks
) -> None:
    journal, log = journal_of(batches, callbacks), request_log()
    async with at_work(journal):
        for _ in range(3):
            gain(journal, log)
            await whole(journal, log)
    assert [size for _, size in batches.sizes] == [1, 1, 1]


@pytest.mark.usefixtures("endless_pace")
async def test_what_a_call_has_no_room_for_does_not_wait(batches: Batches, callbacks: JournalCallbacks) -> None:
    journal = journal_of(batches, callbacks)
    logs = [request_log() for _ in range(3)]
    async with at_work(journal):
        for log in logs:
            gain(journal, log, 10_000)
        await whole(journal, *logs)
    assert len(batches.sizes) == 2


@pytest.mark.usefixtures("endless_pace")
async def test_the_end_of_a_request_does_not_wait(batches: Batches, callbacks: JournalCallbacks) -> None:
    journal, log = journal_of(batches, callbacks), request_log()
    async with at_work(journal):
        gain(journal, log)
        await whole(journal, log)
        gain(journal, log)
        end(log)
        journal.mark_changed(log)
        await whole(journal, log)


@pytest.mark.usefixtures("endless_pace")
async def test_nothing_waits_for_the_next_call_at_the_end(batches: Batches, callbacks: JournalCallbacks) -> None:
    journal, log = journal_of(batches, callbacks), request_log()
    async with at_work(journal):
        for _ in range(2):
            gain(journal, log)
            await asyncio.sleep(0.05)
        assert await journal.flush(60)
    assert log.is_durable


async def test_prompts_of_records_count(batches: Batches, callbacks: JournalCallbacks) -> None:
    journal = journal_of(batches, callbacks)
    logs = [request_log() for _ in range(10)]
    for log in logs:
        log.submit.prompt_token_ids.extend(range(9000))
        journal.mark_changed(log)
    assert await journal.flush(60)
    assert max(size for size, _ in batches.sizes) < 20_000
    assert all(log.is_durable for log in logs)


async def test_a_call_that_failed_is_followed_by_smaller_ones_until_they_are_answered(
    batches: Batches, callbacks: JournalCallbacks
) -> None:
    journal, log = journal_of(batches, callbacks), request_log()
    log.sequences[0].token_ids = [*range(60_000)]
    journal.mark_changed(log)
    batches.num_failures = 2
    assert await journal.flush(60)
    sizes = [size for _, size in batches.sizes]
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.6 * sizes[1]
    assert max(sizes[3:]) > 0.9 * sizes[0]
    assert (await read(batches, log)).sequences[0].token_ids == [*range(60_000)]


async def ended(journal: Journal, key: str, accepted_at: float) -> RequestLog:
    """A request with one token that has ended, as the store knows."""
    log = request_log(key, accepted_at=accepted_at)
    log.sequences[0].token_ids = [1]
    end(log)
    journal.mark_changed(log)
    assert await journal.flush(60)
    return log


async def test_a_finished_record_is_not_overwritten_by_another_submission(
    store: RedisStore, journal: Journal, callbacks: JournalCallbacks
) -> None:
    first, later = await ended(journal, "a", accepted_at=10), request_log("a", accepted_at=11)
    callbacks.durable.clear()
    for step in range(2):
        later.sequences[0].token_ids.append(step)
        journal.mark_changed(later)
        assert await journal.flush(60)
    assert journal.lag == 0
    assert (later.record, later.is_durable) == (RecordState.DISPLACED, False)
    assert callbacks.durable == []
    assert (await read(store, first)).submit == first.submit


async def test_another_submission_that_one_call_cannot_hold_is_not_written_either(
    store: RedisStore, journal: Journal
) -> None:
    first, later = await ended(journal, "a", accepted_at=10), request_log("a", accepted_at=11)
    later.sequences[0].token_ids = [*range(40_000)]
    journal.mark_changed(later)
    assert await journal.flush(60)
    assert later.record is RecordState.DISPLACED
    assert (await read(store, first)).submit == first.submit


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("state", [State.CANCELLED, State.FAILED, State.FINISHED])
async def test_a_request_that_the_store_lost_replaces_the_earlier_one_of_its_name_unless_that_finished(
    store: RedisStore, journal: Journal, keys: "redis.Redis", state: State, is_over: bool
) -> None:
    """As where the primary of a Redis fails before its replica has the later record."""
    earlier, later = request_log("a", accepted_at=10), request_log("a", accepted_at=11)
    journal.mark_changed(later)
    assert await journal.flush(60)
    keys.flushall()
    keys.script_flush()
    ending = Ending(earlier.key, earlier.submit.submission_id, state, 10.5)
    assert await store.write(WriteBatch([earlier], endings=[ending]), EPOCH) == []
    if is_over:
        end(later, State.CANCELLED)
    else:
        later.sequences[0].token_ids = [7]
    journal.mark_changed(later)
    assert await journal.flush(60)
    found = await read(store, later)
    if state is State.FINISHED:
        assert (later.record, found.submit) == (RecordState.DISPLACED, earlier.submit)
    else:
        assert later.is_durable
        assert (found.submit, found.state) == (later.submit, later.state)
        assert found.sequences[0].token_ids == later.sequences[0].token_ids


async def test_a_cancelled_request_and_the_next_of_its_name_may_wait_for_the_store_together(
    store: RedisStore, journal: Journal
) -> None:
    cancelled, later = request_log("a", accepted_at=10), request_log("a", accepted_at=11)
    cancelled.sequences[0].token_ids = [1]
    journal.mark_changed(cancelled)
    assert await journal.flush(60)
    end(cancelled, State.CANCELLED)
    later.sequences[0].token_ids = [7]
    for log in (cancelled, later):
        journal.mark_changed(log)
    assert await journal.flush(60)
    found = await read(store, later)
    assert (found.submit, found.state, found.sequences[0].token_ids) == (later.submit, State.ACCEPTED, [7])
    assert later.is_durable


async def test_why_a_request_failed_and_which_model_began_it_are_written(store: RedisStore, journal: Journal) -> None:
    log = request_log()
    journal.mark_changed(log)
    assert await journal.flush(60)
    log.fingerprint, log.sequences[0].token_ids = b"f" * 32, [1]
    end(log, State.FAILED)
    log.failure = scheduler_v1.FAILURE_REASON_QUARANTINED
    journal.mark_changed(log)
    assert await journal.flush(60)
    found = await read(store, log)
    assert (found.state, found.failure, found.fingerprint) == (State.FAILED, log.failure, log.fingerprint)
