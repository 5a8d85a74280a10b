"""Records of which Redis has lost a part, as one that evicts keys does."""

import pytest
import redis

from request_logs import length_end, request_log
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.base import IncompleteRecord, WriteBatch
from scheduler_svc.store.redis import RedisStore
from store_writes import EPOCH, ending_of, packed, put, tokens_of, write_of

END = length_end().SerializeToString()


def lose(keys: "redis.Redis", log: RequestLog, part: str) -> None:
    assert keys.delete(f"{{quire}}:request:{log.key}:{part}") == 1


async def written(store: RedisStore, name: str | None = None, *, ends: bool = True) -> RequestLog:
    """A record with log-probabilities of prompt and tokens, of two sequences."""
    log = request_log(name, n=2)
    await store.put(log, EPOCH)
    end = END if ends else None
    first = write_of(log, 0, [1, 2], logprobs=packed(-1, -2), prompt_logprobs=packed(-4.0, -5.0), end=end)
    writes = [first, write_of(log, 0, [3], 1, end=end)]
    assert await store.write(WriteBatch(writes=writes, endings=[ending_of(log)] if ends else []), EPOCH) == []
    return log


@pytest.mark.parametrize("part", ["tokens:0", "tokens:1", "logprobs:0", "prompt_logprobs"])
@pytest.mark.parametrize("ends", [False, True])
async def test_a_record_that_lost_a_part_is_not_read(
    part: str, ends: bool, store: RedisStore, keys: "redis.Redis"
) -> None:
    log, other = await written(store, "same", ends=ends), await put(store, request_log(), 9)
    assert await tokens_of(store, log) == [[1, 2], [3]]
    lose(keys, log, part)
    with pytest.raises(IncompleteRecord, match="lost"):
        await store.read(log.key)
    with pytest.raises(IncompleteRecord):
        await store.put(request_log("same"), EPOCH)
    assert [found.key for found in await store.live()] == [other.key]


async def test_a_record_that_lost_some_of_its_tokens_is_not_read(store: RedisStore, keys: "redis.Redis") -> None:
    log = await put(store, request_log(), 1, 2, 3, state=State.FINISHED)
    keys.set(f"{{quire}}:request:{log.key}:tokens:0", b"\1\0\0\0\2\0\0\0")
    with pytest.raises(IncompleteRecord):
        await store.read(log.key)


async def test_a_record_whose_lost_tokens_were_written_again_is_read(store: RedisStore, keys: "redis.Redis") -> None:
    log = await put(store, request_log(), 1, 2, 3)
    lose(keys, log, "tokens:0")
    assert await store.write(WriteBatch(writes=[write_of(log, 0, [1, 2])]), EPOCH) == []
    with pytest.raises(IncompleteRecord):  # gateways were informed that three are durable
        await store.read(log.key)
    assert await store.write(WriteBatch(writes=[write_of(log, 2, [3])]), EPOCH) == []
    assert await tokens_of(store, log) == [[1, 2, 3]]


async def test_what_a_cut_removes_is_not_missed(store: RedisStore) -> None:
    log = await written(store)
    cut = write_of(log, 1, [], logprobs=[], truncates=True, end=END)
    assert await store.write(WriteBatch(writes=[cut]), EPOCH) == []
    assert await tokens_of(store, log) == [[1], [3]]
    nothing = write_of(log, 0, [], truncates=True, end=END)
    assert await store.write(WriteBatch(writes=[nothing]), EPOCH) == []
    assert await tokens_of(store, log) == [[], [3]]


async def test_sequences_without_tokens_are_whole(store: RedisStore) -> None:
    log = await put(store, request_log(n=2), state=State.FINISHED)
    assert await tokens_of(store, log) == [[], []]


async def test_records_of_the_release_before_are_read_without_counts(store: RedisStore, keys: "redis.Redis") -> None:
    log = await written(store, ends=False)
    name = f"{{quire}}:request:{log.key}"
    counts = ["num_tokens:0", "num_tokens:1", "num_logprobs:0", "num_prompt_logprobs"]
    assert keys.hdel(name, *counts) == len(counts)
    assert await tokens_of(store, log) == [[1, 2], [3]]
    assert await store.write(WriteBatch(writes=[write_of(log, 1, [4], 1)]), EPOCH) == []
    assert await tokens_of(store, log) == [[1, 2], [3, 4]]
    lose(keys, log, "tokens:1")
    with pytest.raises(IncompleteRecord):
        await store.read(log.key)


async def test_another_request_under_the_name_of_a_cancelled_one_starts_anew(
    store: RedisStore, keys: "redis.Redis"
) -> None:
    log = await put(store, request_log("same"), 1, 2, state=State.CANCELLED)
    lose(keys, log, "tokens:0")
    second = await put(store, request_log("same"))
    assert await tokens_of(store, second) == [[]]
