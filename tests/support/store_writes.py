"""Helpers to write records to a store and to read them."""

from collections.abc import Sequence

from request_logs import logprobs
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.base import Ending, Write, WriteBatch
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


def packed(*values: float) -> list[bytes]:
    return [one.SerializeToString() for one in logprobs(*values)]
