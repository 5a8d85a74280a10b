"""The one thread on which forward passes run, so that the event loop never waits for a model."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What a piece of work gave, and the time on the thread before it and in it, in seconds."""

    value: T
    idle_seconds: float
    busy_seconds: float


class DeviceThread:
    """Runs work in the order it is submitted, on a thread of its own."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._free_since = time.perf_counter()

    def submit(self, work: Callable[[], T]) -> "Future[Timed[T]]":
        """Queue work. Its result, or what it raises, is the future's; cancelling that unqueues the work at once."""
        return self._executor.submit(self._run, work)

    async def run(self, work: Callable[[], T]) -> T:
        """Queue work and wait for its result."""
        return (await asyncio.wrap_future(self.submit(work))).value

    def close(self) -> None:
        """Drop what is queued, and wait for what runs."""
        self._executor.shutdown(cancel_futures=True)

    def _run(self, work: Callable[[], T]) -> Timed[T]:
        started = time.perf_counter()
        idle = started - self._free_since
        try:
            value = work()
        finally:
            self._free_since = time.perf_counter()
        return Timed(value, idle, self._free_since - started)
