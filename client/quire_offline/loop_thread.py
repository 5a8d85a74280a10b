"""An event loop on a thread of its own, and calls of it from other threads."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class LoopThread:
    """A thread that runs an event loop until it is closed. It does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._is_closed = False
        self._lock = threading.Lock()  # of the flag, and so of what the loop is called with before its end
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:  # KeyboardInterrupt, after which nobody could close this
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]] | None = None) -> T:
        """The result of work on the loop. Must not be called on the loop's own thread. Raises as `start`.

        An exception in the calling thread, such as KeyboardInterrupt, cancels the work, waits for its end, and is
        raised. Work that had its result by then is undone by `undo`.
        """
        future, cancel = self.start(work)
        try:
            return future.result()
        except BaseException:
            cancel()
            wait([future])
            if undo is not None and future.exception() is None:
                self.run(undo(future.result()))
            raise

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work on this loop, awaited on another one. The work is cancelled with the waiting task.

        Raises as `start`.
        """
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(has_ended.set)

        future, cancel = self.start(work)
        future.add_done_callback(wake)
        try:
            await has_ended.wait()
        except asyncio.CancelledError:
            cancel()
            raise
        return future.result()

    def start(self, work: Coroutine[Any, Any, T]) -> "tuple[Future[T], Callable[[], None]]":
        """Begins work on the loop. Returns its future, which ends with the work, and what cancels the work.

        Raises RuntimeError where the loop is closed.
        """
        future: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda done: _copy_result(done, future))

        def cancel() -> None:
            with self._lock:
                if not self._is_closed:  # else its end cancels all work
                    self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

        with self._lock:
            if self._is_closed:
                work.close()
                raise RuntimeError("the model is closed")
            self._loop.call_soon_threadsafe(begin)
        return future, cancel

    def close(self) -> None:
        """Ends the loop, and waits for the thread. Tasks that still run are cancelled. May be called again."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


def _copy_result(task: "asyncio.Task[T]", future: "Future[T]") -> None:
    # The future is not cancelled from outside: it ends when the task has.
    if task.cancelled():
        future.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
