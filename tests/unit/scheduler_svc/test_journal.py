"""The journal beside a real Redis."""

import asyncio
from pathlib import Path

import pytest
import redis

from journals import (
    EPOCH,
    JournalCallbacks,
    at_work,
    contents,
    fail_over,
    journal_of,
    read,
    store_at,
    whole,
)
from redis_server import RedisServer
from request_logs import end, length_end, logprobs, request_log
from scheduler_svc import journal as journal_module
from scheduler_svc.journal import Journal
from scheduler_svc.request_log import RecordState, State
from scheduler_svc.store.base import Gap, KeyTaken, WriteBatch
from scheduler_svc.store.redis import RedisStore


async def test_changes_become_durable_and_are_reported(
    store: RedisStore, journal: Journal, callbacks: JournalCallbacks
) -> None:
    log, other = request_log(n=2), request_log()
    assert await store.put(other, EPOCH) is None
    other.set_record(RecordState.RECORDED)
    async with at_work(journal):
        log.sequences[1].token_ids += [1, 2, 3]
        log.sequences[1].cached_tokens = 16
        for one in (log, other):
            journal.mark_changed(one)
        assert journal.lag > 0
        await whole(journal, log, other)
    assert callbacks.durable == [(log, 1)]
    assert (log.sequences[1].num_durable, log.is_recorded) == (3, True)
    found = await read(store, log)
    assert [one.token_ids for one in found.sequences] == [[], [1, 2, 3]]
    assert found.sequences[1].cached_tokens == 16


async def test_only_what_is_new_is_written(store: RedisStore, journal: Journal, callbacks: JournalCallbacks) -> None:
    log = request_log(n=2)
    for number in range(5):
        log.sequences[number % 2].token_ids.append(number)
        log.sequences[number % 2].logprobs += logprobs(-number)
        journal.mark_changed(log)
        assert await journal.flush(60)
    assert callbacks.durable == [(log, number % 2) for number in range(5)]
    found = await read(store, log)
    assert [one.token_ids for one in found.sequences] == [[0, 2, 4], [1, 3]]
    assert [one.logprobs for one in found.sequences] == [logprobs(0, -2, -4), logprobs(-1, -3)]


async def test_ends_and_endings_are_written(store: RedisStore, journal: Journal, callbacks: JournalCallbacks) -> None:
    log, cancelled = request_log(), request_log()
    log.sequences[0].token_ids = [1]
    for one in (log, cancelled):
        journal.mark_changed(one)
    assert await journal.flush(60)
    end(log)
    end(cancelled, State.CANCELLED)
    for one in (log, cancelled):
        journal.mark_changed(one)
    assert await journal.flush(60)
    assert log.is_durable
    assert cancelled.is_durable
    found = await read(store, log)
    assert (found.state, found.ended_at, found.sequences[0].end) == (State.FINISHED, 2000.0, length_end())
    assert (await read(store, cancelled)).state is State.CANCELLED
    assert callbacks.durable == [(log, 0), (log, 0)]
    assert await store.live() == []


async def test_sequences_of_a_search_come_with_its_end(store: RedisStore, journal: Journal) -> None:
    log = request_log(n=2)
    log.submit.beam_search.width = 2
    finished, log.sequences = log.sequences, []
    journal.mark_changed(log)
    assert await journal.flush(60)
    assert (await read(store, log)).sequences == []
    log.sequences = finished
    for index, sequence in enumerate(log.sequences):
        sequence.token_ids, sequence.score = [index], -1.5 * index
    end(log)
    journal.mark_changed(log)
    assert await journal.flush(60)
    assert [(one.token_ids, one.score) for one in (await read(store, log)).sequences] == [([0], 0.0), ([1], -1.5)]


async def test_a_truncated_sequence_continues_with_other_tokens(store: RedisStore, journal: Journal) -> None:
    log = request_log()
    (sequence,) = log.sequences
    sequence.token_ids, sequence.end = [1, 2, 3, 4], length_end()
    journal.mark_changed(log)
    assert await journal.flush(60)
    del sequence.token_ids[2:]
    sequence.end = None
    journal.truncate(log, 0)
    assert (sequence.num_durable, sequence.is_end_durable) == (2, False)
    sequence.token_ids += [8]
    assert await journal.flush(60)
    (found,) = (await read(store, log)).sequences
    assert (found.token_ids, found.end) == ([1, 2, 8], None)


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_cut_that_the_store_lost_is_done_again(
    store: RedisStore, journal: Journal, keys: "redis.Redis", is_over: bool
) -> None:
    log = request_log()
    (sequence,) = log.sequences
    sequence.token_ids = [*range(100)]
    journal.mark_changed(log)
    assert await journal.flush(60)
    before = contents(keys)
    del sequence.token_ids[80:]
    journal.truncate(log, 0)
    for _ in range(2):  # what is written last does not cut
        sequence.token_ids += [7]
        journal.mark_changed(log)
        assert await journal.flush(60)
    if is_over:
        end(log)
        journal.mark_changed(log)
        assert await journal.flush(60)
    fail_over(keys, before)
    other = request_log()
    journal.mark_changed(other)  # the next call to the store finds that it was restarted
    assert await journal.flush(60)
    found = await read(store, log)
    assert (found.sequences[0].token_ids, found.state) == ([*range(80), 7, 7], log.state)
    assert log.is_durable


class Slow(RedisStore):
    """While it `is_slow`, calls wait on their way until they are let through."""

    def __init__(self, url: str) -> None:
        super().__init__(url, 500)
        self.is_slow = False
        self.is_called, self.is_let = asyncio.Event(), asyncio.Event()

    async def write(self, batch: WriteBatch, epoch: int) -> list[Gap | KeyTaken]:
        if self.is_slow:
            self.is_called.set()
            await self.is_let.wait()
        return await super().write(batch, epoch)


async def test_a_cut_while_its_tokens_are_on_their_way_holds(lasting: RedisServer, callbacks: JournalCallbacks) -> None:
    store = Slow(lasting.url)
    try:
        journal, log = journal_of(store, callbacks), request_log()
        (sequence,) = log.sequences
        journal.mark_changed(log)
        assert await journal.flush(60)
        sequence.token_ids = [1, 2, 3, 4]
        journal.mark_changed(log)
        store.is_slow = True
        writing = asyncio.create_task(journal.flush(60))
        async with asyncio.timeout(60):
            await store.is_called.wait()
        del sequence.token_ids[1:]
        journal.truncate(log, 0)
        sequence.token_ids += [7]
        store.is_let.set()
        assert await writing
        assert (await read(store, log)).sequences[0].token_ids == [1, 7]
        assert log.is_durable
    finally:
        await store.close()


async def test_tokens_that_the_store_lost_are_written_again(
    store: RedisStore, journal: Journal, keys: "redis.Redis"
) -> None:
    log = request_log()
    log.sequences[0].token_ids = [1, 2, 3]
    journal.mark_changed(log)
    assert await journal.flush(60)
    name = "{quire}:request:" + log.key + ":tokens:0"
    keys.set(name, keys.getrange(name, 0, 3))
    log.sequences[0].token_ids.append(4)
    end(log)
    journal.mark_changed(log)
    assert await journal.flush(60)
    found = await read(store, log)
    assert (found.sequences[0].token_ids, found.state) == ([1, 2, 3, 4], State.FINISHED)


async def test_a_record_that_the_store_lost_is_written_again_with_all_its_tokens(
    store: RedisStore, journal: Journal, keys: "redis.Redis"
) -> None:
    log = request_log(n=2)
    log.sequences[0].token_ids, log.sequences[1].token_ids = [1, 2], [5]
    journal.mark_changed(log)
    assert await journal.flush(60)
    keys.flushall()
    log.sequences[0].token_ids.append(3)
    journal.mark_changed(log)
    assert await journal.flush(60)
    assert [one.token_ids for one in (await read(store, log)).sequences] == [[1, 2, 3], [5]]
    assert log.is_durable


async def test_what_gathers_while_the_store_is_away_is_written_when_it_is_back(
    tmp_path: Path, callbacks: JournalCallbacks
) -> None:
    server = RedisServer(tmp_path)
    async with store_at(server) as store:
        journal = journal_of(store, callbacks)
        async with at_work(journal):
            logs = [request_log() for _ in range(600)]  # more than one call takes
            for log in logs:
                log.sequences[0].token_ids.append(1)
                journal.mark_changed(log)
            async with asyncio.timeout(60):
                while not journal.is_degraded:
                    await asyncio.sleep(0.01)
            assert not callbacks.durable
            for log in logs:
                log.sequences[0].token_ids.append(2)
                journal.mark_changed(log)
            server.start()
            try:
                await whole(journal, *logs)
                assert not journal.is_degraded
                assert [log.sequences[0].token_ids for log in await store.live()] == [[1, 2]] * 600
            finally:
                server.kill()


async def test_what_a_restarted_store_lost_is_written_again(tmp_path: Path, callbacks: JournalCallbacks) -> None:
    server = RedisServer(tmp_path)
    async with store_at(server) as store:
        journal = journal_of(store, callbacks)
        server.start()
        try:
            running, over = request_log(), request_log()
            for log in (running, over):
                log.sequences[0].token_ids = [1, 2]
                journal.mark_changed(log)
            end(over)
            assert await journal.flush(60)
            server.kill()
            for kept in tmp_path.rglob("*.aof*"):
                kept.unlink()
            server.start()
            async with at_work(journal):
                async with asyncio.timeout(60):
                    while await store.read(running.key) is None or await store.read(over.key) is None:
                        await asyncio.sleep(0.01)
                await whole(journal, running, over)
            assert (await read(store, running)).sequences[0].token_ids == [1, 2]
            found = await read(store, over)
            assert (found.state, found.sequences[0].token_ids) == (State.FINISHED, [1, 2])
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("large", "kept"), [(None, [False, False, True, True, True]), (4, [False, False, False, False, True])]
)
async def test_of_what_is_over_and_cannot_be_written_the_latest_are_kept(
    large: int | None,
    kept: list[bool],
    tmp_path: Path,
    callbacks: JournalCallbacks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many as their weight allows."""
    monkeypatch.setattr(journal_module, "_MAX_KEPT", 3 * 1024 + 500)
    server = RedisServer(tmp_path)
    async with store_at(server) as store:
        journal = journal_of(store, callbacks)
        running, over = request_log(), [request_log() for _ in range(5)]
        if large is not None:
            over[large].submit.attachment = bytes(8 * 2000)
        for log in (running, *over):
            journal.mark_changed(log)
        for log in over:
            end(log, State.FAILED)
        async with at_work(journal), asyncio.timeout(60):
            while store.is_answering:
                await asyncio.sleep(0.01)
        server.start()
        try:
            assert await journal.flush(60)
            found = [await store.read(log.key) is not None for log in (running, *over)]
            assert found == [True, *kept]
        finally:
            server.kill()


async def test_a_later_term_ends_the_journal(store: RedisStore, journal: Journal, callbacks: JournalCallbacks) -> None:
    await store.write(WriteBatch(), EPOCH + 1)
    log = request_log()
    journal.mark_changed(log)
    async with asyncio.timeout(60):
        await journal.run()
    assert callbacks.num_stale == 1
    assert await store.read(log.key) is None
    journal.mark_changed(log)
    assert not await journal.flush(60)
    assert callbacks.num_stale == 1


async def test_an_epoch_that_is_raised_between_two_calls_is_not_stale(
    store: RedisStore, journal: Journal, callbacks: JournalCallbacks
) -> None:
    log = request_log()
    async with at_work(journal):
        async with journal.paused():
            await store.write(WriteBatch(), EPOCH + 1)
            journal.mark_changed(log)
            await asyncio.sleep(0)
            journal.epoch = EPOCH + 1
        await whole(journal, log)
    assert callbacks.num_stale == 0


async def test_a_flush_times_out_and_the_next_one_continues(lasting: RedisServer, callbacks: JournalCallbacks) -> None:
    async with store_at(lasting) as store:
        journal, log = journal_of(store, callbacks), request_log()
        log.sequences[0].token_ids = [1]
        journal.mark_changed(log)
        lasting.pause()
        try:
            assert not await journal.flush(0.05)
            assert journal.lag >= 0.05
        finally:
            lasting.resume()
        assert await journal.flush(60)
        assert journal.lag == 0
        assert (await read(store, log)).sequences[0].token_ids == [1]


async def test_a_lag_of_seconds_is_degraded(
    journal: Journal, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_MAX_LAG", 0.02)
    assert not journal.is_degraded
    journal.mark_changed(request_log())
    await asyncio.sleep(0.03)
    assert journal.is_degraded
    assert await journal.flush(60)
    assert not journal.is_degraded


async def test_a_log_that_was_read_back_continues(
    store: RedisStore, journal: Journal, callbacks: JournalCallbacks
) -> None:
    log = request_log()
    log.sequences[0].token_ids = [1, 2]
    journal.mark_changed(log)
    assert await journal.flush(60)
    successor = journal_of(store, callbacks)
    restored = await read(store, log)
    restored.sequences[0].token_ids.append(3)
    end(restored)
    successor.mark_changed(restored)
    assert await successor.flush(60)
    found = await read(store, log)
    assert (found.sequences[0].token_ids, found.state) == ([1, 2, 3], State.FINISHED)
