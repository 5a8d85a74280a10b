"""What every store does with records and tokens."""

import asyncio
from collections.abc import Sequence

import pytest
import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from request_logs import end, length_end, logprobs, request_log
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.base import Ending, Gap, KeyTaken, StaleEpoch, Write, WriteBatch
from scheduler_svc.store.redis import RedisStore

EPOCH = 100


def write_of(log: RequestLog, offset: int, tokens: Sequence[int], index: int = 0, **more: object) -> Write:
    return Write(log.key, log.submit.submission_id, index, offset, tokens, **more)  # type: ignore[arg-type]


def ending_of(log: RequestLog, state: State = State.FINISHED) -> Ending:
    return Ending(log.key, log.submit.submission_id, state, 2000.0)


async def tokens_of(store: RedisStore, log: RequestLog) -> list[list[int]]:
    found = await store.read(log.key)
    assert found is not None
    return [sequence.token_ids for sequence in found.sequences]


async def put(store: RedisStore, log: RequestLog, *tokens: int, state: State | None = None) -> RequestLog:
    assert await store.put(log, EPOCH) is None
    endings = [] if state is None else [ending_of(log, state)]
    assert await store.write(WriteBatch(writes=[write_of(log, 0, tokens)], endings=endings), EPOCH) == []
    return log


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


async def test_an_ending_says_why_the_request_failed(store: RedisStore) -> None:
    log, why = await put(store, request_log(), 1), scheduler_v1.FAILURE_REASON_QUARANTINED
    ending = Ending(log.key, log.submit.submission_id, State.FAILED, 2000.0, why)
    assert await store.write(WriteBatch(endings=[ending]), EPOCH) == []
    found = await store.read(log.key)
    assert found is not None
    assert (found.state, found.failure) == (State.FAILED, why)


async def test_no_record_is_read_as_none(store: RedisStore) -> None:
    assert await store.read("no such key") is None


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


async def test_a_write_beyond_what_is_there_is_told_and_not_done(store: RedisStore) -> None:
    log, other = await put(store, request_log(), 1, 2), await put(store, request_log())
    batch = WriteBatch(writes=[write_of(other, 0, [8]), write_of(log, 3, [4])])
    assert await store.write(batch, EPOCH) == [Gap(1, 2)]
    assert await tokens_of(store, log) == [[1, 2]]
    assert await tokens_of(store, other) == [[8]]


async def test_a_write_without_a_record_is_told_and_not_done(store: RedisStore) -> None:
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


@pytest.mark.parametrize("state", [State.ACCEPTED, State.FINISHED])
async def test_a_key_that_is_live_or_finished_stays_with_its_submission(store: RedisStore, state: State) -> None:
    first = await put(store, request_log("a"), 1, 2, state=None if state is State.ACCEPTED else state)
    second = request_log("a")
    found = await store.put(second, EPOCH)
    assert found is not None
    assert (found.submit, found.state, found.sequences[0].token_ids) == (first.submit, state, [1, 2])


@pytest.mark.parametrize("state", [State.CANCELLED, State.FAILED, State.DEADLINE_EXCEEDED])
async def test_a_key_whose_request_did_not_finish_is_free(store: RedisStore, state: State) -> None:
    await put(store, request_log("a", n=2), 1, 2, state=state)
    second = request_log("a")
    assert await store.put(second, EPOCH) is None
    found = await store.read(second.key)
    assert found is not None
    assert (found.submit, found.state, found.ended_at) == (second.submit, State.ACCEPTED, None)
    assert [sequence.token_ids for sequence in found.sequences] == [[]]


async def test_a_submission_may_be_put_again_until_it_has_gone_on(store: RedisStore) -> None:
    log = request_log()
    assert await store.put(log, EPOCH) is None
    assert await store.put(log, EPOCH) is None
    await store.write(WriteBatch(writes=[write_of(log, 0, [1])]), EPOCH)
    found = await store.put(log, EPOCH)
    assert found is not None
    assert found.sequences[0].token_ids == [1]


async def test_a_batch_puts_records_before_their_tokens_and_endings(store: RedisStore) -> None:
    log = request_log()
    batch = WriteBatch([log], [write_of(log, 0, [1])], [ending_of(log, State.CANCELLED)])
    assert await store.write(batch, EPOCH) == []
    found = await store.read(log.key)
    assert found is not None
    assert (found.sequences[0].token_ids, found.state) == ([1], State.CANCELLED)


async def test_a_record_of_a_batch_that_is_there_keeps_its_tokens(store: RedisStore) -> None:
    log = await put(store, request_log(), 1, 2)
    assert await store.write(WriteBatch([log], [write_of(log, 2, [3])]), EPOCH) == []
    assert await tokens_of(store, log) == [[1, 2, 3]]


@pytest.mark.parametrize("state", [State.ACCEPTED, State.FINISHED])
async def test_a_later_submission_of_a_batch_leaves_an_answer_alone_and_is_told(
    store: RedisStore, state: State
) -> None:
    first = request_log("a", accepted_at=10)
    await put(store, first, 1, 2, state=None if state is State.ACCEPTED else state)
    later = request_log("a", accepted_at=11)
    taken = [KeyTaken(later.key, later.submit.submission_id)]
    assert await store.write(WriteBatch([later]), EPOCH) == taken
    assert await store.write(WriteBatch([later], [write_of(later, 0, [7])], [ending_of(later)]), EPOCH) == taken
    assert await store.write(WriteBatch(writes=[write_of(later, 1, [8])]), EPOCH) == taken
    found = await store.read(first.key)
    assert found is not None
    assert (found.submit, found.state, found.sequences[0].token_ids) == (first.submit, state, [1, 2])


@pytest.mark.parametrize("state", [State.CANCELLED, State.FAILED, State.DEADLINE_EXCEEDED])
async def test_of_two_submissions_in_batches_the_later_one_has_the_key_if_the_other_did_not_finish(
    store: RedisStore, state: State
) -> None:
    early, late = request_log("a", accepted_at=10), request_log("a", accepted_at=11)
    await store.write(WriteBatch([early], [write_of(early, 0, [1, 2])], [ending_of(early, state)]), EPOCH)
    assert await store.write(WriteBatch([late]), EPOCH) == []
    taken = [KeyTaken(early.key, early.submit.submission_id)]
    assert await store.write(WriteBatch([early], [write_of(early, 0, [1, 2])], [ending_of(early)]), EPOCH) == taken
    found = await store.read(late.key)
    assert found is not None
    assert (found.submit, found.state, found.sequences[0].token_ids) == (late.submit, State.ACCEPTED, [])


async def test_of_a_beam_search_there_are_no_sequences_until_they_are_written(store: RedisStore) -> None:
    log = request_log(n=2)
    log.submit.beam_search.width = 4
    log.sequences = []
    await store.put(log, EPOCH)
    assert await tokens_of(store, log) == []
    await store.write(WriteBatch(writes=[write_of(log, 0, [5], index=1), write_of(log, 0, [4], index=0)]), EPOCH)
    assert await tokens_of(store, log) == [[4], [5]]


async def test_live_tells_what_has_not_ended_in_order_of_acceptance(store: RedisStore) -> None:
    later = await put(store, request_log(accepted_at=20), 2)
    sooner = await put(store, request_log(accepted_at=10), 1)
    await put(store, request_log(accepted_at=5), 3, state=State.FINISHED)
    live = await store.live()
    assert [(log.key, log.sequences[0].token_ids) for log in live] == [(sooner.key, [1]), (later.key, [2])]


async def test_live_tells_of_more_than_one_call_brings(store: RedisStore) -> None:
    logs = [request_log(accepted_at=number) for number in range(300)]
    await store.write(WriteBatch(logs), EPOCH)
    assert [log.key for log in await store.live()] == [log.key for log in logs]


async def test_live_leaves_out_records_that_have_expired(store: RedisStore, keys: "redis.Redis") -> None:
    log = await put(store, request_log(), 1)
    keys.delete("{quire}:request:" + log.key)
    assert await store.live() == []
    assert keys.smembers("{quire}:live") == set()


async def test_every_call_of_an_earlier_term_is_refused_and_does_nothing(store: RedisStore) -> None:
    log, other = await put(store, request_log(), 1), request_log()
    assert await store.put(request_log(), EPOCH + 1) is None
    batch = WriteBatch([other], [write_of(log, 1, [2])], [ending_of(log)])
    for call in (store.put(other, EPOCH), store.write(batch, EPOCH), store.renew([log.key], EPOCH)):
        with pytest.raises(StaleEpoch):
            await call
    assert await store.read(other.key) is None
    found = await store.read(log.key)
    assert found is not None
    assert (found.sequences[0].token_ids, found.state) == ([1], State.ACCEPTED)


async def test_puts_side_by_side_wait_for_their_turn(store: RedisStore) -> None:
    logs = [request_log() for _ in range(200)]
    assert await asyncio.gather(*(store.put(log, EPOCH) for log in logs)) == [None] * 200
    assert len(await store.live()) == 200


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
