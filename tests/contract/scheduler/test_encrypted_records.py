"""Encrypted records at a takeover: requests continue, and one whose record cannot be decrypted fails alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_harness import TIMEOUT, Worker, candidate, expected, left_behind, scheduler, until_recorded
from scheduler_process import SERVICE, SERVING, scheduler_process
from scheduler_svc.live_state import Graces
from scheduler_svc.request_log import State
from scheduler_svc.store.encryption import RecordKeys
from scheduler_svc.store.redis import RedisStore

AT_ONCE = Graces(taken_over=0.05)
ITEMS = b"items of a conversation"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nid = "own"\nkey = "{"11" * 32}"\n')
    return path


@pytest.fixture
async def own(redis_url: str, keys_file: Path) -> AsyncIterator[RedisStore]:
    """A store with the scheduler's keys."""
    store = RedisStore(redis_url, 600, record_keys=RecordKeys.read(keys_file))
    yield store
    await store.close()


async def test_a_request_continues_after_a_crash(
    redis_url: str, worker: Worker, keys_file: Path, own: RedisStore
) -> None:
    async with candidate(redis_url, [worker.port], record_keys_file=keys_file) as first:
        await first.until_leading()
        async with first.session() as session:
            await session.ready()
            submit = await session.submit(max_tokens=200, n=2, detachable=True, attachment=ITEMS)
            for index in range(2):
                await session.until_tokens(submit.key, 40, index)
            await first.crash()
    async with scheduler(redis_url, [worker.port], record_keys_file=keys_file, graces=AT_ONCE):
        log = await until_recorded(own, submit.key, State.FINISHED)
    assert [sequence.token_ids for sequence in log.sequences] == [expected(200)] * 2
    assert log.submit.attachment == ITEMS
    with redis.Redis.from_url(redis_url) as keys:
        fields = keys.hgetall(f"{{quire}}:request:{submit.key}")
    assert fields[b"key_id"] == b"own"
    assert not any(ITEMS in value for value in fields.values())


async def test_one_that_cannot_be_decrypted_fails_alone(
    redis_url: str, worker: Worker, keys_file: Path, own: RedisStore, store: RedisStore
) -> None:
    strangers = RedisStore(redis_url, 600, record_keys=RecordKeys({"another": b"k" * 32}))
    lost = await left_behind(strangers, expected(5), body_digest=b"same", detachable=True)
    readable, clear = [await left_behind(one, expected(5), detachable=True) for one in (own, store)]
    async with (
        scheduler(redis_url, [worker.port], record_keys_file=keys_file, graces=AT_ONCE) as running,
        running.session() as session,
    ):
        await session.ready()
        for submit in (readable, clear):
            log = await until_recorded(own, submit.key, State.FINISHED)
            assert log.sequences[0].token_ids == expected(20)
        repeated = scheduler_v1.Submit.FromString(lost.SerializeToString())
        repeated.submission_id, repeated.command_id = "another", 1001
        await session.send(submit=repeated)
        for answer in (await session.attach(lost.key), await session.answer(1001)):
            assert answer.failed.reason == scheduler_v1.FAILURE_REASON_RECORD_UNDECRYPTABLE
            assert "encrypted with the key 'another'" in answer.failed.message
        new = await session.submit()
        assert (await session.answer(new.command_id)).accepted.is_durable
    await strangers.close()


async def test_a_changed_file_of_keys_is_used_without_a_restart(
    redis_url: str, worker: Worker, keys_file: Path
) -> None:
    variables = {"QUIRE_RECORD_KEYS_FILE": str(keys_file), "QUIRE_LOG_LEVEL": "info"}
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(scheduler_process(redis_url, worker.port, **variables))
        await running.until(SERVICE, SERVING)
        session = await stack.enter_async_context(running.session())
        await session.ready()
        old = await session.submit(max_tokens=200, detachable=True)
        await session.until_tokens(old.key, 20)
        keys_file.write_text(f'[[keys]]\nid = "next"\nkey = "{"22" * 32}"\n{keys_file.read_text()}')
        async with asyncio.timeout(TIMEOUT):
            while not running.logged("the file of record keys was read again"):
                await asyncio.sleep(0.02)
        new = await session.submit(max_tokens=20, detachable=True)
        both = RedisStore(redis_url, 600, record_keys=RecordKeys.read(keys_file))
        for submit, key_id in ((old, "own"), (new, "next")):
            log = await until_recorded(both, submit.key, State.FINISHED)
            assert (log.sequences[0].token_ids, log.key_id) == (expected(submit.max_tokens), key_id)
        await both.close()
