"""The one thread that launches and finishes steps, so that the event loop never waits for a model.

A step has two halves: while one step runs on the device, the thread launches the next one after it. If the maximum
number of steps is launched, the thread waits for the device; otherwise it sleeps until the device is done or more work
is submitted.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from worker_svc.step import MAX_STEPS_IN_FLIGHT


class Launched(Protocol):
    """Work that was launched on the device."""

    def is_done(self) -> bool:
        """Whether finishing it would not wait."""

    def wait(self) -> None:
        """Returns when it is done or has failed. Any thread may call it, several at once. Raises nothing."""


T = TypeVar("T")
L = TypeVar("L", bound=Launched)


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """The result of work, the time before it in which the device had nothing to do, and the time that it took.

    In seconds. The time of work that was launched after other work begins at the end of that work.
    """

    value: T
    idle_seconds: float
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class _Work:
    """Submitted work. Without `launch` all of it is done in `finish`, with the device to itself."""

    future: "Future[Any]"
    launch: Callable[[], Launched] | None
    finish: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _StartedWork:
    """Work between its halves. `error` is what `launch` raised; it is reported when the work is first in line."""

    work: _Work
    launched: Launched | None
    error: BaseException | None
    started_at: float
    idle_seconds: float

    def is_done(self) -> bool:
        return self.launched is None or self.launched.is_done()

    def wait(self) -> None:
        if self.launched is not None:
            self.launched.wait()


class _Signal:
    """Wakes the thread."""


_DEVICE_DONE, _TOLERANCE = _Signal(), _Signal()


class DeviceThread:
    """Runs work in the order of submission, on a thread of its own.

    A second thread waits for the device, without the GIL, while this thread waits for work; nothing polls. If no more
    work may be launched, this thread waits for the device itself and does not need to be woken.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[_Work | _Signal] = SimpleQueue()
        self._waiter_inbox: SimpleQueue[Launched | None] = SimpleQueue()
        self._queued: deque[_Work] = deque()
        self._started: deque[_StartedWork] = deque()
        self._idle_since = time.perf_counter()
        # Held from a look at `_is_closed` to what is put into the inbox: no work is put there once it is closed.
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiter = threading.Thread(target=self._wait_for_device, name="device-waiter", daemon=True)
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._waiter.start()
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> "Future[Timed[T]]":
        """Queues work that begins when all work before it is finished. The future has its result or exception.

        Cancelling the future removes work that has not begun.
        """
        return self._put(_Work(Future(), None, lambda _: work()))

    def submit_step(self, launch: Callable[[], L], finish: Callable[[L], T]) -> "Future[Timed[T]]":
        """Queues work in two halves: launched while at most one step before it runs, finished when its step is done.

        The future has the result of `finish`, or the exception of either half; cancelling it removes work that was not
        launched. Futures complete in the order of their work.
        """
        return self._put(_Work(Future(), launch, finish))

    async def run(self, work: Callable[[], T]) -> T:
        """Queues work and waits for its result."""
        return (await asyncio.wrap_future(self.submit(work))).value

    def close(self) -> None:
        """Drops queued work and waits for work that runs."""
        with self._lock:
            self._is_closed = True
            self._inbox.put(_TOLERANCE)
        self._thread.join()
        self._waiter.join()

    def _put(self, work: _Work) -> "Future[Any]":
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the device thread is closed")
            self._inbox.put(work)
        return work.future

    def _serve(self) -> None:
        while not self._is_closed:
            if len(self._started) == MAX_STEPS_IN_FLIGHT:
                self._started[0].wait()
            else:
                self._enqueue(self._inbox.get())
            self._advance()
        while not self._inbox.empty():
            self._enqueue(self._inbox.get())
        for work in self._queued:
            work.future.cancel()
        while self._started:
            self._finish_first()
        self._waiter_inbox.put(None)

    def _enqueue(self, item: _Work | _Signal) -> None:
        if isinstance(item, _Work):
            self._queued.append(item)

    def _wait_for_device(self) -> None:
        while (launched := self._waiter_inbox.get()) is not None:
            launched.wait()
            del launched
            self._inbox.put(_DEVICE_DONE)

    def _advance(self) -> None:
        """Finishes and starts whatever can be."""
        while True:
            if self._started and self._started[0].is_done():
                self._finish_first()
            elif self._queued and self._may_start(self._queued[0]):
                self._start(self._queued.popleft())
            else:
                return

    def _may_start(self, work: _Work) -> bool:
        if self._is_closed:
            return False
        return not self._started or (work.launch is not None and len(self._started) < MAX_STEPS_IN_FLIGHT)

    def _start(self, work: _Work) -> None:
        if not work.future.set_running_or_notify_cancel():
            return
        started_at = time.perf_counter()
        idle = 0.0 if self._started else started_at - self._idle_since
        launched, error = None, None
        try:
            launched = None if work.launch is None else work.launch()
        except BaseException as raised:
            error = raised
        self._started.append(_StartedWork(work, launched, error, started_at, idle))
        if launched is not None and not launched.is_done():
            self._waiter_inbox.put(launched)

    def _finish_first(self) -> None:
        started = self._started[0]
        work, value, error = started.work, None, started.error
        if error is None:
            try:
                value = work.finish(started.launched)
            except BaseException as raised:
                error = raised
        self._started.popleft()
        now = time.perf_counter()
        busy = now - max(started.started_at, self._idle_since)
        self._idle_since = now
        if error is not None:
            work.future.set_exception(error)
        else:
            work.future.set_result(Timed(value, started.idle_seconds, busy))
