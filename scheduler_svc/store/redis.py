"""The store in a Redis, of 6.2 or later."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from hashlib import sha1
from itertools import islice
from typing import Any, TypeVar, cast

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from scheduler_svc.request_log import RequestLog
from scheduler_svc.store.base import Batch, Gap, StaleEpoch, StoreUnavailable
from scheduler_svc.store.packing import (
    Argument,
    pack_ending,
    pack_record,
    pack_writes,
    unpack_gaps,
    unpack_log,
)
from scheduler_svc.store.scripts import SCRIPT, STALE

log = logging.getLogger("quire.scheduler")

_KEYS = ("{quire}:epoch", "{quire}:lease")
_LIVE = "{quire}:live"
_SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
_TIMEOUT = 1.0  # seconds that Redis may take to connect, and for each answer
_FAIL_FAST = 0.2  # seconds after a failure in which it is not asked again
_MAX_CONNECTIONS = 32  # for records; who finds them all in use waits
_EPOCH_TTL = 7 * 86400  # seconds; what has no epoch gets a later one all the same, by the clock
_Answer = TypeVar("_Answer")
_CHUNK = 128  # records that one call reads or renews


class RedisStore:
    """Records in the Redis at `url`, kept for `ttl` seconds after their last renewal."""

    def __init__(self, url: str, ttl: int = 3600) -> None:
        # A failed call is not repeated here: its caller knows what to do without an answer.
        options: dict[str, Any] = {
            "socket_timeout": _TIMEOUT,
            "socket_connect_timeout": _TIMEOUT,
            "retry": Retry(NoBackoff(), 0),
        }
        pool = redis.BlockingConnectionPool.from_url(url, max_connections=_MAX_CONNECTIONS, timeout=_TIMEOUT, **options)
        self._records = redis.Redis.from_pool(pool)
        self._leading = redis.Redis.from_url(url, **options)  # steps and lease do not queue behind new requests
        self._ttl = ttl
        self._down_until = 0.0
        self._num_restarts = 0
        self._is_answering = True
        self._last_write = 0

    @property
    def is_answering(self) -> bool:
        """Whether it answered when it was last needed."""
        return self._is_answering

    @property
    def num_restarts(self) -> int:
        """Grows where a connection was lost, or the server does not know the script."""
        return self._num_restarts

    async def put(self, log: RequestLog, epoch: int) -> RequestLog | None:
        """Record an accepted request without its tokens, unless a record is in its way, which is returned."""
        record = pack_record(log)
        reply = await self._call(self._records, "put", epoch, _EPOCH_TTL, self._ttl, *record)
        return None if reply is None else unpack_log(reply)

    async def write(self, batch: Batch, epoch: int) -> list[Gap]:
        """Take in a batch, in one call; returns the writes that could not be done."""
        self._last_write = max(self._last_write + 1, time.time_ns() // 1000)
        rest: list[Argument] = []
        for record in batch.records:
            rest += pack_record(record)
        for ending in batch.endings:
            rest += pack_ending(ending)
        reply = await self._call(
            self._leading,
            "write",
            epoch,
            _EPOCH_TTL,
            self._ttl,
            self._last_write,
            len(batch.records),
            pack_writes(batch.writes),
            *rest,
        )
        return unpack_gaps(reply)

    async def read(self, key: str) -> RequestLog | None:
        """The record of a request, with all its tokens; None where there is none."""
        reply = await self._call(self._records, "read", key)
        return None if reply is None else unpack_log(reply)

    async def live(self) -> list[RequestLog]:
        """Every record whose request has not ended, in order of acceptance."""
        logs: list[RequestLog] = []
        keys = await self._ask(lambda: cast(Awaitable[set[bytes]], self._records.smembers(_LIVE)))
        for chunk in _chunks(sorted(keys)):
            logs += map(unpack_log, await self._call(self._records, "read_live", *chunk))
        return sorted(logs, key=lambda log: log.accepted_at)

    async def renew(self, keys: Iterable[str], epoch: int) -> None:
        """Start the TTL of live requests anew."""
        for chunk in _chunks(keys):
            await self._call(self._leading, "renew", epoch, _EPOCH_TTL, self._ttl, *chunk)

    async def leader(self) -> str | None:
        """Who holds the lease."""
        holder: bytes | None = await self._call(self._leading, "leader")
        return None if holder is None else holder.decode()

    async def take_lease(self, holder: str, seconds: float, floor: int = 0, epoch: int | None = None) -> int | None:
        """Become the leader where there is none, or again; None while another one leads, or a later epoch has begun."""
        held = "" if epoch is None else epoch
        reply = await self._call(self._leading, "take_lease", holder, _milliseconds(seconds), floor, held, _EPOCH_TTL)
        return None if reply is None else int(reply)

    async def keep_lease(self, holder: str, epoch: int, seconds: float) -> bool:
        """Renew the lease, also one that has run out meanwhile. False where there has been a later epoch."""
        reply = await self._call(self._leading, "keep_lease", holder, _milliseconds(seconds), epoch, _EPOCH_TTL)
        return bool(reply)

    async def release_lease(self, holder: str) -> None:
        """Let another one lead at once."""
        await self._call(self._leading, "release_lease", holder)

    async def close(self) -> None:
        """Close the connections."""
        await self._records.aclose()
        await self._leading.aclose()

    async def _call(self, client: "redis.Redis", function: str, *arguments: Argument) -> Any:
        async def evaluate() -> Any:
            given = (len(_KEYS), *_KEYS, function, *arguments)
            try:
                return await client.evalsha(_SHA, *given)  # type: ignore[arg-type]
            except NoScriptError:
                self._num_restarts += 1
                return await client.eval(SCRIPT, *given)  # type: ignore[arg-type]

        return await self._ask(evaluate)

    async def _ask(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """What Redis answers. A cancellation that came meanwhile is raised here: in Python 3.11 the `wait_for` below
        redis-py may lose it.
        """
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task is not None else 0
        try:
            return await self._answer(ask)
        finally:
            if task is not None and task.cancelling() > num_cancels:
                raise asyncio.CancelledError

    async def _answer(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        if time.monotonic() < self._down_until:
            raise StoreUnavailable("Redis failed a moment ago")
        try:
            try:
                answer = await ask()
            except RedisConnectionError:  # of a server that was started anew since: every call may be repeated
                self._num_restarts += 1
                await self._hang_up()
                answer = await ask()
        except ResponseError as error:
            if str(error).startswith(STALE):
                raise StaleEpoch("a scheduler of a later term has written") from None
            raise self._failed(error) from error
        except RedisError as error:
            raise self._failed(error) from error
        if not self._is_answering:
            log.warning("Redis answers again")
            self._is_answering = True
        return answer

    async def _hang_up(self) -> None:
        """Close connections that nobody uses: they broke too, which each would tell only when it is used."""
        for client in (self._records, self._leading):
            await client.connection_pool.disconnect(inuse_connections=False)

    def _failed(self, error: RedisError) -> StoreUnavailable:
        if self._is_answering:
            log.error("Redis failed: what runs might not outlive this scheduler", extra={"error": str(error)})
            self._is_answering = False
        self._down_until = time.monotonic() + _FAIL_FAST
        return StoreUnavailable(str(error))


def _chunks(keys: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(keys)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))
