"""Large records are read in pages, and unpacked beside the event loop."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from quire.worker.v1 import worker_pb2 as worker_v1
from request_logs import request_log
from scheduler_svc.request_log import RequestLog
from scheduler_svc.store.base import StoreUnavailable, UnusableRecord, WriteBatch
from scheduler_svc.store.encryption import NO_KEYS, RecordKeys
from scheduler_svc.store.packing import unpack_log
from scheduler_svc.store.redis import RedisStore
from scheduler_svc.store.scripts import PAGE_BYTES
from store_writes import EPOCH, ending_of, write_of

NUM_TOKENS = 6000
LOGPROBS = worker_v1.TokenLogprobs(logprob=-0.5, top=[worker_v1.Logprob(token_id=7, logprob=-0.5)] * 20)
SLACK = 40_000  # bytes of a page beyond its size: of the last items that were read, and of the fields
KEYS = RecordKeys({"new": b"n" * 32})


async def large_record(store: RedisStore, num_tokens: int = NUM_TOKENS) -> RequestLog:
    """Tokens, and about 300 bytes of log-probabilities with each; those of the prompt, too."""
    log = request_log(n=2)
    assert await store.put(log, EPOCH) is None
    data = LOGPROBS.SerializeToString()
    for index in range(2):
        tokens = range(index, index + num_tokens)
        prompt = [data] * num_tokens if index == 0 else []
        write = write_of(log, 0, tokens, index, logprobs=[data] * num_tokens, prompt_logprobs=prompt)
        assert await store.write(WriteBatch(writes=[write]), EPOCH) == []
    return log


def is_whole(log: RequestLog | None, num_tokens: int = NUM_TOKENS) -> bool:
    assert log is not None
    tokens = [list(range(index, index + num_tokens)) for index in range(2)]
    all_logprobs = [one.logprobs for one in log.sequences] + [log.prompt_logprobs]
    return [one.token_ids for one in log.sequences] == tokens and all(
        one == [LOGPROBS] * num_tokens for one in all_logprobs
    )


def size_of(answer: Any) -> int:
    if isinstance(answer, list):
        return sum(map(size_of, answer))
    return len(answer) if isinstance(answer, bytes) else 0


def on_each_call(store: RedisStore, monkeypatch: pytest.MonkeyPatch, then: Callable[[Any], Any]) -> None:
    """Awaits what `then` returns for each answer with a page."""
    evaluate = store._records.evaluate

    async def spy(function: str, *arguments: Any, **options: Any) -> Any:
        answer = await evaluate(function, *arguments, **options)
        if function in ("put", "read", "read_live"):
            await then(answer)
        return answer

    monkeypatch.setattr(store._records, "evaluate", spy)


@pytest.mark.parametrize("record_keys", [NO_KEYS, KEYS], ids=["clear", "encrypted"])
async def test_no_answer_has_more_than_a_page_of_a_record(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, record_keys: RecordKeys
) -> None:
    store.record_keys = record_keys
    sizes: list[int] = []

    async def note(answer: Any) -> None:
        sizes.append(size_of(answer))

    log = await large_record(store)
    on_each_call(store, monkeypatch, note)
    assert is_whole(await store.read(log.key))
    num_pages = len(sizes)
    assert sum(sizes) > 3 * PAGE_BYTES
    [live] = await store.live()
    assert is_whole(live)
    assert len(sizes) == 2 * num_pages
    assert await store.write(WriteBatch(endings=[ending_of(log)]), EPOCH) == []
    log.submit.submission_id = "another"
    assert is_whole(await store.put(log, EPOCH))
    assert len(sizes) == 3 * num_pages
    assert max(sizes) < PAGE_BYTES + SLACK


async def test_a_record_that_changes_between_two_pages_is_read_again(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await large_record(store)
    data = LOGPROBS.SerializeToString()
    num_left = 1

    async def change(_: Any) -> None:
        nonlocal num_left
        if num_left:
            num_left -= 1
            writes = [
                write_of(log, NUM_TOKENS, [index + NUM_TOKENS], index, logprobs=[data], prompt_logprobs=prompt,
                         prompt_offset=NUM_TOKENS)
                for index, prompt in enumerate(([data], []))
            ]  # fmt: skip
            assert await store.write(WriteBatch(writes=writes), EPOCH) == []

    on_each_call(store, monkeypatch, change)
    assert is_whole(await store.read(log.key), NUM_TOKENS + 1)


async def test_a_record_that_is_removed_between_two_pages_is_read_as_none(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await large_record(store)

    async def remove(_: Any) -> None:
        await store.delete(log.key, EPOCH)

    on_each_call(store, monkeypatch, remove)
    assert await store.read(log.key) is None
    assert await store.live() == []


async def test_a_record_that_never_stays_as_it_is_is_not_read_for_ever(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await large_record(store)
    num_tokens = NUM_TOKENS

    async def extend(_: Any) -> None:
        nonlocal num_tokens
        write = write_of(log, num_tokens, [5], logprobs=[LOGPROBS.SerializeToString()])
        assert await store.write(WriteBatch(writes=[write]), EPOCH) == []
        num_tokens += 1

    on_each_call(store, monkeypatch, extend)
    with pytest.raises(StoreUnavailable, match="changes while it is read"):
        await store.read(log.key)


async def test_a_part_that_cannot_be_read_makes_a_record_unusable(store: RedisStore, keys: Any) -> None:
    log = await large_record(store)
    [name] = [one for one in keys.scan_iter() if one.endswith(b":logprobs:1")]
    keys.set(name, "no list")
    with pytest.raises(UnusableRecord):
        await store.read(log.key)
    assert await store.live() == []


@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
async def test_a_large_record_is_unpacked_on_a_thread(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    on_loop: list[bool] = []

    def spy(*arguments: Any) -> RequestLog:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return unpack_log(*arguments)

    monkeypatch.setattr("scheduler_svc.store.redis.unpack_log", spy)
    log = await large_record(store, num_tokens)
    assert is_whole(await store.read(log.key), num_tokens)
    assert on_loop == [num_tokens == 1]
