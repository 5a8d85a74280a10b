"""An engine, and the thread of its event loop: what the blocking and the asynchronous class share."""

import gc
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from quire_offline.engine import OfflineEngine
from quire_offline.loop_thread import LoopThread
from quire_offline.settings import OfflineSettings

T = TypeVar("T")

_MAX_COLLECTIONS = 10  # a program may refer to the model itself, as by the traceback of an error
_PAUSE = 0.05  # seconds between them


class EngineThread:
    """Loads a model, and runs its engine until it is closed: at the latest when it is dropped, or the process ends."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Raises as LLM does."""
        settings = OfflineSettings.of(options)
        thread = LoopThread("quire-offline")
        try:
            engine = thread.run(OfflineEngine.start(settings))
        except BaseException:
            thread.close()
            raise
        self._thread, self._engine = thread, engine
        # A finalizer also runs at the end of the process, while its threads still can end in order.
        self._close = weakref.finalize(self, _close, thread, engine)

    @property
    def engine(self) -> OfflineEngine:
        """The engine, for work on its loop. Raises RuntimeError where it is closed."""
        if not self._close.alive:
            raise RuntimeError("the model is closed")
        return self._engine

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work on the engine's loop. Cancelled, and awaited, by an exception in this thread."""
        return self._thread.run(work)

    def start(self, work: Coroutine[Any, Any, T]) -> "tuple[Future[T], Callable[[], None]]":
        """Begins work on the engine's loop. Returns its future, and what cancels it."""
        return self._thread.start(work)

    def close(self) -> None:
        """Ends all threads, and frees the model. May be called again."""
        self._close()


def _close(thread: LoopThread, engine: OfflineEngine) -> None:
    thread.run(engine.close())
    thread.close()
    # The model is in cycles, and its own threads end with it. A collection does nothing while another thread collects.
    for _ in range(_MAX_COLLECTIONS):
        gc.collect()
        if engine.runner() is None:
            break
        time.sleep(_PAUSE)
