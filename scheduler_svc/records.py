"""The record of each request in Redis, from its acceptance to its end."""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1

log = logging.getLogger("quire.scheduler")

_Value = str | bytes | float
_PREFIX = "{quire}:request:"  # one hash tag: all keys of a deployment live on one shard
_TIMEOUT = 1.0  # seconds that a request's acceptance may wait for the store
_MAX_KEPT = 10_000  # ends that wait for a store that failed
_RETRY = 2.0  # seconds between attempts to reach a store that failed


# An end is written only for the submission that has the key, and never leaves a key without a TTL.
_END = """
if redis.call('HGET', KEYS[1], 'submission_id') == ARGV[1] then
  redis.call('HSET', KEYS[1], 'state', ARGV[2], 'ended_at', ARGV[3])
  redis.call('EXPIRE', KEYS[1], ARGV[4])
end
"""


class State(StrEnum):
    """Where a recorded request stands."""

    ACCEPTED = "accepted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    FAILED = "failed"


class Records:
    """Request records. While Redis cannot be reached requests run without one: `degraded` says so.

    Every key has a TTL: `ttl` seconds, renewed while its request is live.
    """

    def __init__(self, url: str, ttl: int) -> None:
        # A failed call is not repeated here: the caller goes on in the degraded state instead of waiting.
        self._redis = redis.Redis.from_url(
            url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT, retry=Retry(NoBackoff(), 0)
        )
        self._ttl = ttl
        self._down_until = 0.0

    @property
    def degraded(self) -> bool:
        """Whether the store failed when it was last needed."""
        return self._down_until > 0

    async def accept(self, submit: scheduler_v1.Submit) -> bool:
        """Record a request that is not live. False: its key belongs to another one, which has finished."""
        if time.monotonic() < self._down_until:
            return True
        name = _PREFIX + submit.key
        try:
            holder, state = await self._redis.hmget(name, ["submission_id", "state"])
            if state == State.FINISHED.encode() and holder != submit.submission_id.encode():
                return False
            async with self._redis.pipeline() as calls:  # a transaction: no key is ever left without a TTL
                fields: dict[str, _Value] = {
                    "submission_id": submit.submission_id,
                    "submit": submit.SerializeToString(),
                    "state": State.ACCEPTED,
                    "accepted_at": time.time(),
                }
                calls.hset(name, mapping=fields)  # type: ignore[arg-type]  # its Mapping is invariant in its keys
                calls.hdel(name, "ended_at")
                calls.expire(name, self._ttl)
                await calls.execute()
        except RedisError as error:
            self._failed(error)
        else:
            self._answered()
        return True

    async def end(self, ends: "dict[str, End]") -> bool:
        """Record how requests ended, by key; the TTL starts anew. False: the store failed, and they are to come again.

        A key that another submission has by now is left alone.
        """
        if not ends or time.monotonic() < self._down_until:
            return not ends
        try:
            async with self._redis.pipeline(transaction=False) as calls:
                for key, end in ends.items():
                    values = (end.submission_id, end.state, repr(end.at), str(self._ttl))
                    calls.eval(_END, 1, _PREFIX + key, *values)
                await calls.execute()
        except RedisError as error:
            self._failed(error)
            return False
        self._answered()
        return True

    async def renew(self, keys: Iterable[str]) -> None:
        """Start the TTL of live requests anew."""
        try:
            async with self._redis.pipeline(transaction=False) as calls:
                for key in keys:
                    calls.expire(_PREFIX + key, self._ttl)
                await calls.execute()
        except RedisError as error:
            self._failed(error)
        else:
            self._answered()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    def _failed(self, error: RedisError) -> None:
        if not self.degraded:
            log.error("requests run without a record: redis failed", extra={"error": str(error)})
        self._down_until = time.monotonic() + _RETRY

    def _answered(self) -> None:
        if self.degraded:
            log.warning("redis answers again: requests are recorded")
        self._down_until = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """How and when (seconds since the epoch) a submission ended."""

    submission_id: str
    state: State
    at: float


class RecordWriter:
    """Writes ends of requests behind the steps: one call at a time, what comes meanwhile goes into the next."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._ends: dict[str, End] = {}
        self._pending = asyncio.Event()

    def end(self, key: str, submission_id: str, state: State) -> None:
        """Have the end of a request recorded soon."""
        self._ends[key] = End(submission_id, state, time.time())
        self._pending.set()

    async def run(self) -> None:
        """Write until cancelled. What a failing store does not take is kept for its return, up to _MAX_KEPT ends."""
        while True:
            await self._pending.wait()
            self._pending.clear()
            if not await self.flush():
                await asyncio.sleep(_RETRY)
                self._pending.set()

    async def flush(self) -> bool:
        """Write what is there now; whether the store took it."""
        ends, self._ends = self._ends, {}
        if await self._records.end(ends):
            return True
        newest = [*ends.items()][-_MAX_KEPT:]
        self._ends = {**dict(newest), **self._ends}
        return False
