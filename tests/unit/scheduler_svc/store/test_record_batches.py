"""Records under one key, batches of writes, terms, and which records are live."""

import asyncio

import pytest
import redis

from request_logs import request_log
from scheduler_svc.request_log import State
from scheduler_svc.store.base import Gap, KeyTaken, StaleEpoch, WriteBatch
from scheduler_svc.store.client import Argument
from scheduler_svc.store.redis import RedisStore
from store_writes import EPOCH, ending_of, packed, put, tokens_of, write_of


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
async def test_a_later_submission_of_a_batch_leaves_the_result_alone_and_is_reported(
    store: RedisStore, state: State
) -> None:
    first = request_log("a", accepted_at=10)
    await put(store, first, 1, 2, state=None if state is State.ACCEPTED else state)
    later = request_log("a", accepted_at=11)
    taken = [KeyTaken(later.key, later.submit.submission_id)]
    assert await store.write(WriteBatch([later]), EPOCH) == taken
    assert await store.write(WriteBatch([later], [write_of(later, 0, [7])], [ending_of(later)]), EPOCH) == taken
    assert await store.write(WriteBatch(writes=[write_of(later, 0, [8])]), EPOCH) == [Gap(0, None)]
    assert await store.write(WriteBatch(endings=[ending_of(later)]), EPOCH) == []
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


async def test_live_returns_what_has_not_ended_in_order_of_acceptance(store: RedisStore) -> None:
    later = await put(store, request_log(accepted_at=20), 2)
    sooner = await put(store, request_log(accepted_at=10), 1)
    await put(store, request_log(accepted_at=5), 3, state=State.FINISHED)
    live = await store.live()
    assert [(log.key, log.sequences[0].token_ids) for log in live] == [(sooner.key, [1]), (later.key, [2])]


async def test_live_reads_more_records_than_one_call_returns(store: RedisStore) -> None:
    logs = [request_log(accepted_at=number) for number in range(300)]
    await store.write(WriteBatch(logs), EPOCH)
    assert [log.key for log in await store.live()] == [log.key for log in logs]


async def test_no_answer_of_live_takes_longer_than_the_timeout_of_one(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is that of its bytes, however many records there are, and of its parts, which are read one by one."""
    answers: list[object] = []
    evaluate = store._records.evaluate

    async def noted(function: str, *arguments: Argument) -> object:
        answers.append(await evaluate(function, *arguments))
        return answers[-1]

    monkeypatch.setattr(store._records, "evaluate", noted)
    monkeypatch.setattr("scheduler_svc.store.redis._READ_BYTES", 20_000)
    logs = [request_log(accepted_at=number) for number in range(30)]
    given = packed(*range(-400, 0))
    writes = [write_of(log, 0, range(400), logprobs=given, prompt_logprobs=given) for log in logs]
    await store.write(WriteBatch(logs, writes), EPOCH)
    live = await store.live()
    assert [log.key for log in live] == [log.key for log in logs]
    for log in live:
        assert [one.SerializeToString() for one in log.sequences[0].logprobs] == given
        assert [one.SerializeToString() for one in log.prompt_logprobs] == given
    assert len(answers) > 10
    for answer in answers:
        sizes = sizes_of(answer)
        assert len(sizes) < 200
        assert sum(sizes) < 60_000


def sizes_of(answer: object) -> list[int]:
    """The bytes of each part of an answer."""
    if isinstance(answer, list):
        return [size for part in answer for size in sizes_of(part)]
    return [len(answer) if isinstance(answer, bytes) else 0]


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


async def test_puts_side_by_side_wait_for_their_turn(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.store.client._TURN_TIMEOUT", 60)
    logs = [request_log() for _ in range(200)]
    assert await asyncio.gather(*(store.put(log, EPOCH) for log in logs)) == [None] * 200
    assert len(await store.live()) == 200


async def test_more_reads_than_are_answered_in_the_time_of_a_turn_wait_for_theirs(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways attach to all their requests at once when a leader begins. None of them ends for that."""
    monkeypatch.setattr("scheduler_svc.store.client._TURN_TIMEOUT", 0.001)
    log = await put(store, request_log(), 1)
    assert await asyncio.gather(*(store.read(f"no such key {number}") for number in range(500))) == [None] * 500
    assert await tokens_of(store, log) == [[1]]
