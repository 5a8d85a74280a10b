"""The record of each request in Redis, from its acceptance to its end."""

import asyncio
import logging
import time
from collections.abc import Iterable
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
_RETRY = 2.0  # seconds between attempts to reach a store that failed


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

    async def end(self, states: dict[str, State]) -> None:
        """Record how requests ended, by key; the TTL starts anew."""
        await self._write({key: {"state": state, "ended_at": time.time()} for key, state in states.items()})

    async def renew(self, keys: Iterable[str]) -> None:
        """Start the TTL of live requests anew."""
        await self._write({key: {} for key in keys})

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _write(self, changes: dict[str, dict[str, _Value]]) -> None:
        if not changes or time.monotonic() < self._down_until:
            return
        try:
            async with self._redis.pipeline(transaction=False) as calls:
                for key, fields in changes.items():
                    if fields:
                        calls.hset(_PREFIX + key, mapping=fields)  # type: ignore[arg-type]
                    calls.expire(_PREFIX + key, self._ttl)
                await calls.execute()
        except RedisError as error:
            self._failed(error)
        else:
            self._answered()

    def _failed(self, error: RedisError) -> None:
        if not self.degraded:
            log.error("requests run without a record: redis failed", extra={"error": str(error)})
        self._down_until = time.monotonic() + _RETRY

    def _answered(self) -> None:
        if self.degraded:
            log.warning("redis answers again: requests are recorded")
        self._down_until = 0.0


class RecordWriter:
    """Writes ends of requests behind the steps: one call at a time, what comes meanwhile goes into the next."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._states: dict[str, State] = {}
        self._pending = asyncio.Event()

    def end(self, key: str, state: State) -> None:
        """Have the end of a request recorded soon."""
        self._states[key] = state
        self._pending.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._pending.wait()
            self._pending.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write what is there now."""
        states, self._states = self._states, {}
        await self._records.end(states)
