"""Records that something else than a scheduler has changed or written: each costs its own request, and nothing else."""

import logging

import pytest
import redis

from request_logs import request_log
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.base import Gap, MalformedRecord, UnusableRecord, WriteBatch
from scheduler_svc.store.redis import RedisStore
from store_writes import EPOCH, ending_of, put, tokens_of, write_of

FIELDS = {
    "submit": b"\xff\xff",
    "submission_id": b"\xff",
    "accepted_at": b"nan",
    "deadline": b"tomorrow",
    "count": b"many",
    "version": b"new",
    "cached:0": b"-",
    "end:0": b"\xff",
    "score:0": b"1",
    "prompt_cost": b"1.5",
    "num_tokens:0": b"x",
    "failure": b"none",
}


def name_of(log: RequestLog, part: str = "") -> str:
    return f"{{quire}}:request:{log.key}{part}"


async def both(store: RedisStore) -> tuple[RequestLog, RequestLog]:
    """The records of a request with the name `same`, which a test makes malformed, and of another one."""
    return await put(store, request_log("same"), 1, 2), await put(store, request_log(), 9)


async def check_others(store: RedisStore, log: RequestLog, other: RequestLog) -> None:
    """The other request is taken over, renewed and written beside the malformed one."""
    await store.renew([log.key, other.key], EPOCH)
    assert [found.key for found in await store.live()] == [other.key]
    writes, endings = [write_of(log, 2, [3]), write_of(other, 1, [10])], [ending_of(log), ending_of(other)]
    await store.write(WriteBatch(writes=writes, endings=endings), EPOCH)
    assert await tokens_of(store, other) == [[9, 10]]
    assert store.is_answering


@pytest.mark.parametrize("field", FIELDS)
async def test_a_record_with_a_malformed_field_is_unusable_and_others_are_not(
    field: str, store: RedisStore, keys: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    log, other = await both(store)
    keys.hset(name_of(log), field, FIELDS[field])
    for call in (store.read(log.key), store.put(request_log("same"), EPOCH)):
        with pytest.raises(MalformedRecord):
            await call
    with caplog.at_level(logging.ERROR, "quire.scheduler"):
        await check_others(store, log, other)
    assert [record.message for record in caplog.records] == ["a request is not taken over"]


@pytest.mark.parametrize("field", ["submit", "submission_id", "accepted_at", "count"])
async def test_a_record_that_lost_a_field_is_unusable_and_others_are_not(
    field: str, store: RedisStore, keys: "redis.Redis"
) -> None:
    log, other = await both(store)
    assert keys.hdel(name_of(log), field)
    for call in (store.read(log.key), store.put(request_log("same"), EPOCH)):
        with pytest.raises(MalformedRecord):
            await call
    await check_others(store, log, other)


@pytest.mark.parametrize("state", [b"lost", None])
async def test_a_record_without_a_state_is_unusable_and_its_name_is_free(
    state: bytes | None, store: RedisStore, keys: "redis.Redis"
) -> None:
    log, other = await both(store)
    if state is None:
        keys.hdel(name_of(log), "state")
    else:
        keys.hset(name_of(log), "state", state)
    with pytest.raises(MalformedRecord):
        await store.read(log.key)
    assert [found.key for found in await store.live()] == [other.key]
    assert await tokens_of(store, await put(store, request_log("same"), 5)) == [[5]]


async def test_a_part_of_a_token_is_unusable(store: RedisStore, keys: "redis.Redis") -> None:
    log, other = await both(store)
    keys.append(name_of(log, ":tokens:0"), b"\1")
    with pytest.raises(MalformedRecord):
        await store.read(log.key)
    await check_others(store, log, other)


@pytest.mark.parametrize("part", [":tokens:0", ":logprobs:0", ":prompt_logprobs", ""])
async def test_something_else_under_a_key_of_a_record_is_unusable(
    part: str, store: RedisStore, keys: "redis.Redis"
) -> None:
    log, other = await both(store)
    keys.delete(name_of(log, part))
    keys.sadd(name_of(log, part), "x")
    with pytest.raises(UnusableRecord):
        await store.read(log.key)
    await check_others(store, log, other)
    await store.delete(log.key, EPOCH)  # a write may have removed it before
    assert await store.read(log.key) is None
    assert await tokens_of(store, await put(store, request_log("same"), 5)) == [[5]]


async def test_a_record_of_another_request_is_unusable(store: RedisStore, keys: "redis.Redis") -> None:
    log, other = await both(store)
    theirs = await put(store, request_log(), 5, 6)
    keys.copy(name_of(theirs), name_of(log), replace=True)
    assert await store.delete(theirs.key, EPOCH)
    with pytest.raises(MalformedRecord):
        await store.read(log.key)
    await check_others(store, log, other)


@pytest.mark.parametrize("part", [":tokens:0", ":logprobs:0", ""])
async def test_the_record_of_a_live_request_is_written_anew(part: str, store: RedisStore, keys: "redis.Redis") -> None:
    log, other = await both(store)
    keys.delete(name_of(log, part))
    keys.sadd(name_of(log, part), "x")
    writes = [write_of(log, 0, [1, 2, 3], logprobs=[b"", b"", b""]), write_of(other, 1, [10])]
    assert await store.write(WriteBatch(writes=writes), EPOCH) == [Gap(0, None)]
    assert await store.write(WriteBatch([log], writes, [ending_of(log)]), EPOCH) == []
    found = await store.read(log.key)
    assert found is not None
    assert (found.state, found.sequences[0].token_ids) == (State.FINISHED, [1, 2, 3])
