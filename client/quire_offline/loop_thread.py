"""An event loop on a thread of its own, and calls of it from other threads."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class LoopThread:
    """A thread that runs an event loop until it is closed. It does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work on the loop. Must not be called on the loop's own thread.

        An exception in the calling thread, such as KeyboardInterrupt, cancels the work, waits for its end, and is
        raised.
        """
        future, cancel = self.start(work)
        try:
            return future.result()
        except BaseException:
            cancel()
            wait([future])
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> "tuple[Future[T], Callable[[], None]]":
        """Begins work on the loop. Returns its future, which ends with the work, and what cancels the work."""
        future: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda done: _copy_result(done, future))

        def cancel() -> None:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

        self._loop.call_soon_threadsafe(begin)
        return future, cancel

    def close(self) -> None:
        """Ends the loop, and waits for the thread. Tasks that still run are cancelled. May be called again."""
        if self._thread.is_alive():
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
