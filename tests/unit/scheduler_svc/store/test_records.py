"""A record and its tokens are read as they were written."""

from dataclasses import replace

import pytest
import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from request_logs import end, length_end, logprobs, request_log
from scheduler_svc.request_log import State
from scheduler_svc.store.base import DeletedSubmission, Ending, Gap, StaleEpoch, UnsupportedRecord, WriteBatch
from scheduler_svc.store.redis import RedisStore
from store_writes import EPOCH, ending_of, put, tokens_of, write_of
from svc_common.protocols import RECORD_VERSIONS


async def test_record_comes_back_whole(store: RedisStore) -> None:
    log = request_log(n=2, deadline=1234.5678)
    log.fingerprint = b"f" * 32
    assert await store.put(log, EPOCH) is None
    found = await store.read(log.key)
    assert found is not None
    assert (found.key, found.accepted_at, found.deadline, found.state) == (log.key, 1000.0, 1234.5678, State.ACCEPTED)
    assert (len(found.sequences), found.ended_at) == (2, None)
    assert found.is_durable
    assert (found.submit, found.fingerprint, found.failure) == (log.submit, log.fingerprint, None)


async def test_a_fingerprint_may_come_with_the_first_tokens(store: RedisStore) -> None:
    log = await put(store, request_log())
    found = await store.read(log.key)
    assert found is not None
    assert found.fingerprint == b""
    await store.write(WriteBatch(writes=[write_of(log, 0, [1], fingerprint=b"f" * 32)]), EPOCH)
    await store.write(WriteBatch(writes=[write_of(log, 1, [2])]), EPOCH)
    found = await store.read(log.key)
    assert found is not None
    assert found.fingerprint == b"f" * 32


async def test_an_ending_has_the_reason_of_the_failure(store: RedisStore) -> None:
    log, why = await put(store, request_log(), 1), scheduler_v1.FAILURE_REASON_QUARANTINED
    ending = Ending(log.key, log.submit.submission_id, State.FAILED, 2000.0, why)
    assert await store.write(WriteBatch(endings=[ending]), EPOCH) == []
    found = await store.read(log.key)
    assert found is not None
    assert (found.state, found.failure) == (State.FAILED, why)


async def test_no_record_is_read_as_none(store: RedisStore) -> None:
    assert await store.read("no such key") is None


@pytest.mark.parametrize("state", [None, State.FINISHED])
async def test_a_deleted_record_is_gone_with_all_its_keys(
    store: RedisStore, keys: "redis.Redis", state: State | None
) -> None:
    log, other = await put(store, request_log(n=2), 1, 2, state=state), await put(store, request_log(), 3)
    given = [one.SerializeToString() for one in logprobs(-0.5)]
    await store.write(WriteBatch(writes=[write_of(log, 0, [7], index=1, logprobs=given)]), EPOCH)
    assert await store.delete(log.key, EPOCH)
    assert await store.read(log.key) is None
    assert list(keys.scan_iter(f"*{log.key}*")) == []
    assert [one.key for one in await store.live()] == [other.key]
    assert not await store.delete(log.key, EPOCH)
    assert await store.write(WriteBatch(endings=[ending_of(log)]), EPOCH) == []
    assert await store.read(log.key) is None


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_deleted_submission_is_not_recorded_again_for_a_minute(
    store: RedisStore, keys: "redis.Redis", is_full: bool
) -> None:
    log = await put(store, request_log("name"), 1)
    keys.config_set("maxmemory", int(is_full))
    try:
        assert await store.delete(log.key, EPOCH)
    finally:
        keys.config_set("maxmemory", 0)
    with pytest.raises(DeletedSubmission):
        await store.put(log, EPOCH)
    assert store.is_answering
    another = request_log("name")
    assert await store.put(another, EPOCH) is None
    name = f"{{quire}}:deleted:{log.submit.submission_id}"
    assert 0 < keys.ttl(name) <= 60
    keys.delete(name)  # as after a minute
    found = await store.put(log, EPOCH)
    assert found is not None
    assert found.submit.submission_id == another.submit.submission_id


@pytest.mark.parametrize("is_recorded", [False, True])
async def test_a_withdrawn_submission_is_not_recorded_for_a_minute(
    store: RedisStore, keys: "redis.Redis", is_recorded: bool
) -> None:
    log = request_log("name")
    if is_recorded:
        await store.put(log, EPOCH)
    ending = replace(ending_of(log, State.FAILED), is_withdrawn=True)
    assert await store.write(WriteBatch(endings=[ending]), EPOCH) == []
    with pytest.raises(DeletedSubmission):
        await store.put(log, EPOCH)
    assert await store.live() == []
    assert 0 < keys.ttl(f"{{quire}}:deleted:{log.submit.submission_id}") <= 60
    assert await store.put(request_log("name"), EPOCH) is None


async def test_a_replaced_scheduler_deletes_nothing(store: RedisStore) -> None:
    log = await put(store, request_log(), 1)
    with pytest.raises(StaleEpoch):
        await store.delete(log.key, EPOCH - 1)
    assert await tokens_of(store, log) == [[1]]


async def test_everything_of_a_sequence_comes_back(store: RedisStore) -> None:
    log = request_log(n=2)
    await store.put(log, EPOCH)
    given = logprobs(-0.5, -1.25)
    writes = [
        write_of(log, 0, [7, 2**32 - 1], logprobs=[one.SerializeToString() for one in given], cached_tokens=16),
        write_of(log, 0, [9], index=1, cached_tokens=0, end=length_end().SerializeToString(), score=-0.1),
    ]
    assert await store.write(WriteBatch(writes=writes, endings=[ending_of(log)]), EPOCH) == []
    found = await store.read(log.key)
    assert found is not None
    first, second = found.sequences
    assert (first.token_ids, first.logprobs, first.cached_tokens, first.end, first.score) == (
        [7, 2**32 - 1],
        given,
        16,
        None,
        None,
    )
    assert (second.token_ids, second.logprobs, second.cached_tokens, second.end, second.score) == (
        [9],
        [],
        0,
        length_end(),
        -0.1,
    )
    assert (first.num_durable, first.is_end_durable, second.num_durable, second.is_end_durable) == (2, False, 1, True)
    assert (found.state, found.ended_at, found.is_durable) == (State.FINISHED, 2000.0, True)


async def test_an_end_without_a_cause_is_an_end(store: RedisStore) -> None:
    log = request_log()
    await store.put(log, EPOCH)
    await store.write(WriteBatch(writes=[write_of(log, 0, [1], end=b"")]), EPOCH)
    found = await store.read(log.key)
    assert found is not None
    assert found.sequences[0].end == scheduler_v1.SequenceEnd()


async def test_writes_append_and_a_repeated_one_changes_nothing(store: RedisStore) -> None:
    log = await put(store, request_log(), 1, 2, 3)
    for _ in range(2):
        assert await store.write(WriteBatch(writes=[write_of(log, 3, [4, 5])]), EPOCH) == []
    assert await store.write(WriteBatch(writes=[write_of(log, 1, [2, 3])]), EPOCH) == []
    assert await tokens_of(store, log) == [[1, 2, 3, 4, 5]]


async def test_repeated_logprobs_stand_once(store: RedisStore) -> None:
    log = request_log()
    await store.put(log, EPOCH)
    given = logprobs(-1, -2, -3)
    packed = [one.SerializeToString() for one in given]
    await store.write(WriteBatch(writes=[write_of(log, 0, [1, 2], logprobs=packed[:2])]), EPOCH)
    for _ in range(2):
        await store.write(WriteBatch(writes=[write_of(log, 1, [2, 3], logprobs=packed[1:])]), EPOCH)
    found = await store.read(log.key)
    assert found is not None
    assert (found.sequences[0].token_ids, found.sequences[0].logprobs) == ([1, 2, 3], given)


async def test_a_write_beyond_what_is_there_is_reported_and_not_done(store: RedisStore) -> None:
    log, other = await put(store, request_log(), 1, 2), await put(store, request_log())
    batch = WriteBatch(writes=[write_of(other, 0, [8]), write_of(log, 3, [4])])
    assert await store.write(batch, EPOCH) == [Gap(1, 2)]
    assert await tokens_of(store, log) == [[1, 2]]
    assert await tokens_of(store, other) == [[8]]


async def test_a_write_without_a_record_is_reported_and_not_done(store: RedisStore) -> None:
    log = request_log()
    assert await store.write(WriteBatch(writes=[write_of(log, 0, [1])], endings=[ending_of(log)]), EPOCH) == [
        Gap(0, None)
    ]
    assert await store.read(log.key) is None


async def test_missing_tokens_and_missing_logprobs_are_gaps(store: RedisStore, keys: "redis.Redis") -> None:
    log = request_log()
    await store.put(log, EPOCH)
    packed = [one.SerializeToString() for one in logprobs(-1, -2)]
    await store.write(WriteBatch(writes=[write_of(log, 0, [1, 2], logprobs=packed)]), EPOCH)
    keys.delete("{quire}:request:" + log.key + ":logprobs:0")
    further = write_of(log, 2, [3], logprobs=packed[:1])
    assert await store.write(WriteBatch(writes=[further]), EPOCH) == [Gap(0, 0)]
    keys.delete("{quire}:request:" + log.key + ":tokens:0")
    assert await store.write(WriteBatch(writes=[write_of(log, 2, [3])]), EPOCH) == [Gap(0, 0)]


async def test_what_has_a_gap_does_not_end(store: RedisStore) -> None:
    log = await put(store, request_log(), 1)
    assert await store.write(WriteBatch(writes=[write_of(log, 2, [3])], endings=[ending_of(log)]), EPOCH)
    found = await store.read(log.key)
    assert found is not None
    assert found.state is State.ACCEPTED


async def test_a_cut_removes_what_is_beyond_it(store: RedisStore) -> None:
    log = request_log()
    await store.put(log, EPOCH)
    packed = [one.SerializeToString() for one in logprobs(-1, -2, -3)]
    length = length_end().SerializeToString()
    await store.write(WriteBatch(writes=[write_of(log, 0, [1, 2, 3], logprobs=packed, end=length, score=-1.0)]), EPOCH)
    await store.write(WriteBatch(writes=[write_of(log, 2, [], truncates=True)]), EPOCH)
    found = await store.read(log.key)
    assert found is not None
    (sequence,) = found.sequences
    assert (sequence.token_ids, sequence.logprobs) == ([1, 2], logprobs(-1, -2))
    assert (sequence.end, sequence.score) == (None, None)


async def test_a_cut_may_bring_other_tokens_and_an_end(store: RedisStore) -> None:
    log = await put(store, request_log(), 1, 2, 3, 4)
    stop = scheduler_v1.SequenceEnd(stop_string=scheduler_v1.StopString())
    await store.write(WriteBatch(writes=[write_of(log, 1, [9], truncates=True, end=stop.SerializeToString())]), EPOCH)
    found = await store.read(log.key)
    assert found is not None
    assert (found.sequences[0].token_ids, found.sequences[0].end) == ([1, 9], stop)


async def test_a_cut_to_nothing_leaves_nothing(store: RedisStore) -> None:
    log = await put(store, request_log(), 1, 2)
    await store.write(WriteBatch(writes=[write_of(log, 0, [], truncates=True)]), EPOCH)
    assert await tokens_of(store, log) == [[]]


async def test_of_a_beam_search_there_are_no_sequences_until_they_are_written(store: RedisStore) -> None:
    log = request_log(n=2)
    log.submit.beam_search.width = 4
    log.sequences = []
    await store.put(log, EPOCH)
    assert await tokens_of(store, log) == []
    await store.write(WriteBatch(writes=[write_of(log, 0, [5], index=1), write_of(log, 0, [4], index=0)]), EPOCH)
    assert await tokens_of(store, log) == [[4], [5]]


async def test_finished_log_of_a_whole_run_is_the_log_that_was_written(store: RedisStore) -> None:
    log = request_log(n=3, accepted_at=1720000000.123456)
    log.sequences[1].logprobs = [worker_v1.TokenLogprobs(logprob=-1)]
    for index, sequence in enumerate(log.sequences):
        sequence.token_ids = [index]
    end(log)
    writes = [
        write_of(log, 0, sequence.token_ids, index, logprobs=[one.SerializeToString() for one in sequence.logprobs])
        for index, sequence in enumerate(log.sequences)
    ]
    await store.write(WriteBatch([log], writes, [ending_of(log)]), EPOCH)
    found = await store.read(log.key)
    assert found is not None
    assert found.accepted_at == log.accepted_at
    assert [one.token_ids for one in found.sequences] == [one.token_ids for one in log.sequences]
    assert [one.logprobs for one in found.sequences] == [one.logprobs for one in log.sequences]


async def test_a_record_has_the_oldest_version_that_can_say_what_it_holds(
    store: RedisStore, keys: "redis.Redis"
) -> None:
    plain, embedding = request_log(), request_log()
    embedding.submit.result.embedding.SetInParent()
    for log, version in ((plain, b"1"), (embedding, b"2")):
        assert await store.put(log, EPOCH) is None
        assert keys.hget(f"{{quire}}:request:{log.key}", "version") == version


async def test_a_record_without_a_version_is_of_version_1(store: RedisStore, keys: "redis.Redis") -> None:
    log = await put(store, request_log(), 1, 2)
    keys.hdel(f"{{quire}}:request:{log.key}", "version")
    assert await tokens_of(store, log) == [[1, 2]]
    assert [found.key for found in await store.live()] == [log.key]


async def test_a_record_of_a_later_release_is_not_changed(store: RedisStore, keys: "redis.Redis") -> None:
    newer, own = await put(store, request_log("newer"), 1), await put(store, request_log(), 2)
    keys.hset(f"{{quire}}:request:{newer.key}", "version", RECORD_VERSIONS.newest + 1)
    reason = f"a record of version {RECORD_VERSIONS.newest + 1}, and this scheduler reads {RECORD_VERSIONS}"
    with pytest.raises(UnsupportedRecord, match=reason):
        await store.read(newer.key)
    with pytest.raises(UnsupportedRecord, match=reason):
        await store.put(request_log("newer"), EPOCH)
    assert [found.key for found in await store.live()] == [own.key]
    assert keys.strlen(f"{{quire}}:request:{newer.key}:tokens:0") == 4
