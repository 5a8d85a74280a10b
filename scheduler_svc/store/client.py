"""Calls to a Redis that may fail, be slow, or be restarted."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha1
from typing import Any, TypeVar, cast

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, RedisClusterException, RedisError, ResponseError

from scheduler_svc.store.base import CallNotSent, DeletedSubmission, EpochOutsideWindow, StaleEpoch, StoreUnavailable
from scheduler_svc.store.connection import RedisConnections
from scheduler_svc.store.scripts import DELETED, OUTSIDE_WINDOW, SCRIPT, STALE, StoreKeys

log = logging.getLogger("quire.scheduler")

_SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
_TURN_TIMEOUT = 1.0  # seconds that a call waits for its turn
# The same of a call without which a request ends: a new leader is asked for thousands at once. If Redis fails
# meanwhile, those that wait fail with it.
_PATIENT_TURN_TIMEOUT = 30.0
_MAX_CALLS = 32  # at once, each on its own connection; others wait
_READ_ONLY = "-READONLY "  # in the error of a script, in Redis 6.2
_Answer = TypeVar("_Answer")
Argument = str | bytes | int | float


@dataclass(slots=True)
class ServerHistory:
    """What the clients of one store have seen of their server."""

    has_answered: bool = False
    num_restarts: int = 0
    """Lost connections, and answers that the server lacks the script, other than the first answer of all."""


class RedisClient:
    """Calls of one `kind` on the `keys` of a deployment, with their own connections.

    Failures of one kind do not affect another.
    After a failure every call fails for `fail_fast` seconds without being sent. `on_lost` is called when a connection
    was lost, before the call is repeated. Every call may raise StoreUnavailable, StaleEpoch and what else the script's
    errors stand for.
    """

    def __init__(
        self,
        connections: RedisConnections,
        keys: StoreKeys,
        kind: str,
        history: ServerHistory,
        fail_fast: float,
        on_lost: Callable[[], Awaitable[None]],
    ) -> None:
        self._connections = connections
        self._redis = connections.client
        self._node: object = None
        self.is_answering = True
        self._history = history
        self._keys = keys
        self._kind = kind
        self._fail_fast = fail_fast
        self._on_lost = on_lost
        self._down_until = 0.0
        self._turns = asyncio.Semaphore(min(_MAX_CALLS, connections.max_connections))

    async def evaluate(
        self, function: str, *arguments: Argument, timeout: float | None = None, is_patient: bool = False
    ) -> Any:
        """The result of a function of the script; `timeout` is for the whole call, in seconds. One that `is_patient`
        waits longer for its turn.
        """

        async def ask() -> Any:
            given = (len(self._keys), *self._keys, function, *arguments)
            try:
                return await self._redis.evalsha(_SHA, *given)
            except NoScriptError:
                self._history.num_restarts += self._history.has_answered
                return await self._redis.eval(SCRIPT, *given)

        return await self._ask(ask, timeout, _PATIENT_TURN_TIMEOUT if is_patient else _TURN_TIMEOUT)

    async def members(self, name: str) -> set[bytes]:
        """The members of a set."""
        return await self._ask(lambda: cast(Awaitable[set[bytes]], self._redis.smembers(name)))

    async def eviction_policy(self) -> str | None:
        """The server's `maxmemory-policy`; None where this user may not read it."""

        async def ask() -> str | None:
            try:
                return (await self._connections.memory_info(self._keys.epoch)).get("maxmemory_policy")
            except ResponseError:  # the command is forbidden or renamed
                return None

        return await self._ask(ask)

    async def hang_up(self) -> None:
        """Closes the connections that are not in use."""
        await self._connections.hang_up()

    async def close(self) -> None:
        """Closes the connections."""
        await self._connections.close()

    async def _ask(
        self, ask: Callable[[], Awaitable[_Answer]], timeout: float | None = None, turn_timeout: float = _TURN_TIMEOUT
    ) -> _Answer:
        """Redis' answer. A cancellation meanwhile is raised here: the `wait_for` of Python 3.11 that redis-py uses may
        lose it.
        """
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task is not None else 0
        await self._take_turn(turn_timeout)
        try:
            async with asyncio.timeout(timeout):
                return await self._answer(ask)
        except TimeoutError as error:
            raise self._failed("it took too long to answer") from error
        finally:
            self._turns.release()
            if task is not None and task.cancelling() > num_cancels:
                raise asyncio.CancelledError

    async def _take_turn(self, timeout: float) -> None:
        """Waits for a connection. A timeout here is not a failure of Redis."""
        try:
            async with asyncio.timeout(timeout):
                await self._turns.acquire()
        except TimeoutError:
            raise CallNotSent("too many calls wait for Redis") from None

    async def _answer(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        if time.monotonic() < self._down_until:
            raise CallNotSent("Redis failed a moment ago")
        self._connections.follow_primary()
        try:
            try:
                answer = await _attempt(ask)
            except RedisConnectionError:  # restarted, or replaced: every call may be repeated
                self._history.num_restarts += 1
                await self._on_lost()
                answer = await _attempt(ask)
            if self._has_moved():
                self._history.num_restarts += 1
                await self._on_lost()
        except ResponseError as error:
            if str(error).startswith(STALE):
                raise StaleEpoch("a scheduler of a later term has written") from None
            if str(error).startswith(OUTSIDE_WINDOW):
                raise EpochOutsideWindow from None
            if str(error).startswith(DELETED):
                raise DeletedSubmission from None
            raise self._failed(str(error)) from error
        except RedisError as error:
            raise self._failed(str(error)) from error
        self._history.has_answered = True
        if not self.is_answering:
            log.warning("Redis answers again", extra={"calls": self._kind})
            self.is_answering = True
        return answer

    def _has_moved(self) -> bool:
        """Whether another server has answered than before."""
        before, self._node = self._node, self._connections.node_of(self._keys.epoch)
        return before is not None and self._node != before

    def _failed(self, why: str) -> StoreUnavailable:
        if self.is_answering:
            log.error(
                "Redis failed: what runs might not outlive this scheduler", extra={"calls": self._kind, "error": why}
            )
            self.is_answering = False
        self._down_until = time.monotonic() + self._fail_fast
        return StoreUnavailable(why)


async def _attempt(ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Redis' answer. Raises ConnectionError where uvloop raises RuntimeError, as for a closed transport, where no node
    of a cluster answers, and where the server has become a replica: another connection may lead to the primary.
    """
    try:
        return await ask()
    except RedisClusterException as error:
        raise RedisConnectionError(str(error)) from error
    except ResponseError as error:
        if not isinstance(error, ReadOnlyError) and _READ_ONLY not in str(error):
            raise
        raise RedisConnectionError("the server is a replica") from error
    except RuntimeError as error:
        if "closed" not in str(error):
            raise
        raise RedisConnectionError(str(error)) from error
