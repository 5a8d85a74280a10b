"""How long a record is kept after its end."""

import pytest
import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from redis_server import RedisServer
from request_logs import request_log
from scheduler_svc.request_log import RecordState, RequestLog, State
from scheduler_svc.store.base import Ending, WriteBatch
from scheduler_svc.store.redis import RedisStore
from store_writes import EPOCH, packed, tokens_of, write_of

TTL, GRACE = 500, 20.0


async def written(store: RedisStore, log: RequestLog) -> RequestLog:
    """A record that has everything that one can have."""
    await store.put(log, EPOCH)
    writes = [
        write_of(log, 0, [1, 2], index, logprobs=packed(-1, -2), prompt_logprobs=packed(-3) if index == 0 else ())
        for index in range(2)
    ]
    assert await store.write(WriteBatch(writes=writes), EPOCH) == []
    return log


@pytest.mark.parametrize("is_beam_search", [False, True])
@pytest.mark.parametrize(("seconds", "kept"), [(None, TTL), (0, 20), (77, 77), (TTL, TTL), (10**6, TTL)])
async def test_every_key_of_a_record_is_kept_as_long_as_it_is_to_be(
    server: RedisServer, keys: "redis.Redis", seconds: int | None, kept: int, is_beam_search: bool
) -> None:
    store = RedisStore(server.url, TTL, grace=GRACE)
    log = request_log(n=2)
    if is_beam_search:
        log.submit.beam_search.width = 4
    await written(store, log)
    names = list(keys.scan_iter("{quire}:request:*"))
    assert len(names) == 6
    assert all(kept - 60 < keys.ttl(name) <= TTL for name in names)
    for state in (State.FINISHED, State.CANCELLED):  # a write may be repeated
        ending = Ending(log.key, log.submit.submission_id, state, 2000.0, kept_seconds=seconds)
        assert await store.write(WriteBatch(endings=[ending]), EPOCH) == []
        assert all(kept - 10 <= keys.ttl(name) <= kept for name in names)
    await store.close()


@pytest.mark.parametrize(("most", "kept"), [(None, 20), (5, 5), (77, 20)])
async def test_the_grace_after_an_end_is_no_longer_than_the_request_allows(
    server: RedisServer, keys: "redis.Redis", most: int | None, kept: int
) -> None:
    store, log = RedisStore(server.url, TTL, grace=GRACE), request_log()
    log.submit.retention.CopyFrom(scheduler_v1.Retention(most_seconds=most or 0))
    await store.put(log, EPOCH)
    ending = Ending(
        log.key,
        log.submit.submission_id,
        State.FINISHED,
        2000.0,
        kept_seconds=log.kept_seconds,
        most_kept_seconds=log.most_kept_seconds,
    )
    assert await store.write(WriteBatch(endings=[ending]), EPOCH) == []
    assert all(kept - 4 <= keys.ttl(name) <= kept for name in keys.scan_iter("{quire}:request:*"))
    await store.close()


@pytest.mark.parametrize("offset", [0, 1], ids=["all", "some"])
async def test_a_stop_match_after_the_end_does_not_prolong_a_record(
    server: RedisServer, keys: "redis.Redis", offset: int
) -> None:
    store = RedisStore(server.url, TTL, grace=GRACE)
    log = await written(store, request_log(n=2))
    ending = Ending(log.key, log.submit.submission_id, State.FINISHED, 2000.0, kept_seconds=30)
    assert await store.write(WriteBatch(endings=[ending]), EPOCH) == []
    write = write_of(
        log, offset, [1][offset:], logprobs=packed(-1)[offset:], prompt_logprobs=packed(-3), truncates=True
    )
    assert await store.write(WriteBatch(writes=[write]), EPOCH) == []
    assert await tokens_of(store, log) == [[1], [1, 2]]
    names = list(keys.scan_iter("{quire}:request:*"))
    assert len(names) == 6
    assert all(20 <= keys.ttl(name) <= 30 for name in names)
    await store.close()


def test_a_log_has_what_its_request_asked_for() -> None:
    log = request_log()
    assert (log.kept_seconds, log.record, log.is_writable) == (None, RecordState.UNRECORDED, True)
    for seconds in (0, 77):
        log.submit.retention.CopyFrom(scheduler_v1.Retention(seconds=seconds))
        asked = RequestLog(log.submit, 1000.0)
        assert (asked.kept_seconds, asked.record, asked.is_writable) == (seconds, RecordState.UNRECORDED, True)
    log.submit.retention.is_unrecorded = True
    asked = RequestLog(log.submit, 1000.0)
    assert (asked.record, asked.is_writable, asked.is_recorded) == (RecordState.EXCLUDED, False, False)
