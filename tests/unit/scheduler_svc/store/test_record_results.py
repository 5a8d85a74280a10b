"""Results other than tokens in records: values, and log-probabilities of a prompt."""

import pytest
import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from request_logs import logprobs, request_log
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.base import Gap, WriteBatch
from scheduler_svc.store.redis import RedisStore
from store_writes import EPOCH, ending_of, packed, put, tokens_of, write_of


async def prompt_of(store: RedisStore, log: RequestLog) -> list[float]:
    """A prompt's log-probabilities in the store."""
    found = await store.read(log.key)
    assert found is not None
    assert found.num_prompt_logprobs_durable == len(found.prompt_logprobs)
    return [one.logprob for one in found.prompt_logprobs]


async def test_a_value_comes_back_as_the_end_of_its_sequence(store: RedisStore) -> None:
    log = request_log()
    await store.put(log, EPOCH)
    value = scheduler_v1.SequenceEnd(value=worker_v1.PromptValue(numbers=[0.5, -2.0] * 500))
    write = write_of(log, 0, [], end=value.SerializeToString(), cached_tokens=7)
    for _ in range(2):
        assert await store.write(WriteBatch(writes=[write], endings=[ending_of(log)]), EPOCH) == []
    found = await store.read(log.key)
    assert found is not None
    [sequence] = found.sequences
    assert (sequence.end, sequence.token_ids, sequence.cached_tokens) == (value, [], 7)
    assert sequence.is_end_durable


async def test_log_probabilities_of_a_prompt_come_back_in_order(store: RedisStore) -> None:
    log = request_log()
    await store.put(log, EPOCH)
    for offset, values in ((0, [-1.0, -2.0]), (2, [-3.0])):
        write = write_of(log, 0, [], prompt_offset=offset, prompt_logprobs=packed(*values))
        assert await store.write(WriteBatch(writes=[write]), EPOCH) == []
    assert await prompt_of(store, log) == [-1.0, -2.0, -3.0]
    assert [found.prompt_logprobs for found in await store.live()] == [logprobs(-1.0, -2.0, -3.0)]


async def test_log_probabilities_that_are_there_stay_as_they_are(store: RedisStore) -> None:
    log = request_log()
    await store.put(log, EPOCH)
    for offset, values in ((0, [-1.0, -2.0]), (0, [-8.0, -8.0]), (1, [-8.0, -3.0]), (0, [-8.0])):
        write = write_of(log, 0, [], prompt_offset=offset, prompt_logprobs=packed(*values))
        assert await store.write(WriteBatch(writes=[write]), EPOCH) == []
    assert await prompt_of(store, log) == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize("values", [[], [-3.0]])
async def test_log_probabilities_beyond_what_is_there_are_a_gap(values: list[float], store: RedisStore) -> None:
    log = await put(store, request_log(), 1, 2)
    write = write_of(log, 2, [3], prompt_offset=1, prompt_logprobs=packed(*values))
    assert await store.write(WriteBatch(writes=[write], endings=[ending_of(log)]), EPOCH) == [Gap(0, 2)]
    assert await tokens_of(store, log) == [[1, 2]]
    assert await prompt_of(store, log) == []


async def test_log_probabilities_of_a_prompt_live_and_go_with_their_record(
    store: RedisStore, keys: "redis.Redis"
) -> None:
    log = request_log("name")
    await store.put(log, EPOCH)
    await store.write(WriteBatch(writes=[write_of(log, 0, [], prompt_logprobs=packed(-1.0))]), EPOCH)
    [name] = keys.scan_iter("*:prompt_logprobs")
    assert keys.ttl(name) > 0
    keys.expire(name, 5)
    await store.renew([log.key], EPOCH)
    assert keys.ttl(name) > 5
    await store.write(WriteBatch(endings=[ending_of(log, State.CANCELLED)]), EPOCH)
    assert await store.put(request_log("name"), EPOCH) is None
    assert await prompt_of(store, log) == []


async def test_a_request_whose_prompt_is_given_has_gone_on(store: RedisStore) -> None:
    """A repeated submission is answered with it."""
    log = request_log()
    await store.put(log, EPOCH)
    await store.write(WriteBatch(writes=[write_of(log, 0, [], prompt_logprobs=packed(-1.0))]), EPOCH)
    found = await store.put(log, EPOCH)
    assert found is not None
    assert found.prompt_logprobs == logprobs(-1.0)
