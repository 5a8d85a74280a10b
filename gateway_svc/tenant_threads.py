"""Threads that tenants use by turns: no tenant holds all of them, and its queue does not delay another's work."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from gateway_svc.work_costs import LONG

T = TypeVar("T")


class TenantThreads:
    """A tenant's work runs in the order of its calls, on all threads but one at most."""

    def __init__(self, num_threads: int, name: str) -> None:
        """Takes at least two threads."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_idle = num_threads
        self._max_running = num_threads - 1
        self._running: Counter[str] = Counter()
        # Tenants with waiting work, the next one first. A future is done when its work may start.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """The result of work in a thread. Work that has started goes on after a cancellation, and keeps its thread."""
        await self._wait_for_turn(tenant)
        loop = asyncio.get_running_loop()
        future = self._threads.submit(work)

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop was closed in between
                loop.call_soon_threadsafe(self._release, tenant)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    async def run_if_long(self, tenant: str, cost: float, work: Callable[[], T]) -> T:
        """The result of work that takes about `cost` microseconds; on the calling thread unless that is long."""
        return work() if cost <= LONG else await self.run(tenant, work)

    def close(self) -> None:
        """Ends the threads once their work in progress has ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_turn(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._start()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._release(tenant)
            raise

    def _start(self) -> None:
        """Gives idle threads to the tenants whose turn it is."""
        while self._num_idle and (tenant := self._next_tenant()) is not None:
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the others
            if turn.cancelled():
                continue
            turn.set_result(None)
            self._num_idle -= 1
            self._running[tenant] += 1

    def _next_tenant(self) -> str | None:
        return next((tenant for tenant in self._waiting if self._running[tenant] < self._max_running), None)

    def _release(self, tenant: str) -> None:
        self._num_idle += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._start()
