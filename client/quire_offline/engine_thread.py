"""An engine, and the thread of its event loop: what the blocking and the asynchronous class share."""

import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from gateway_svc.settings import BadSetting
from gateway_svc.tokenizer import InvalidModelFiles
from quire_offline.engine import OfflineEngine
from quire_offline.errors import LoadError
from quire_offline.loop_thread import LoopThread
from quire_offline.settings import OfflineSettings
from svc_common.models import ModelNotFound
from worker_svc.errors import StartupFailed

T = TypeVar("T")


class EngineThread:
    """Loads a model, and runs its engine until it is closed: at the latest when it is dropped, or the process ends."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Raises as LLM does."""
        settings = OfflineSettings.of(options)
        thread = LoopThread("quire-offline")
        try:
            engine = thread.run(OfflineEngine.start(settings), undo=OfflineEngine.close)
        except BaseException as error:
            thread.close()
            if isinstance(error, BadSetting | InvalidModelFiles | ModelNotFound | StartupFailed):
                raise LoadError(settings.in_arguments(str(error))) from error
            raise
        self._thread, self._engine, self._process = thread, engine, os.getpid()
        # Also run at the end of the process, while its threads still can end in order.
        self._finalizer = weakref.finalize(self, _drop, thread, engine, threading.current_thread(), self._process)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a model that is loaded cannot be copied or pickled: load it in each process that needs it")

    @property
    def engine(self) -> OfflineEngine:
        """The engine, for work on its loop. Raises RuntimeError where it is closed, and in a fork of its process."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the model was loaded in process {self._process}, and this is a fork of it, without its threads: "
                "load the model in this process, or begin the process with spawn"
            )
        if not self._finalizer.alive:
            raise RuntimeError("the model is closed")
        return self._engine

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work on the engine's loop. Cancelled, and awaited, by an exception in this thread."""
        return self._thread.run(work)

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The same, for a caller on another event loop. The work is cancelled with the caller."""
        return await self._thread.wait_for(work)

    def start(self, work: Coroutine[Any, Any, T]) -> "tuple[Future[T], Callable[[], None]]":
        """Begins work on the engine's loop. Returns its future, and what cancels it."""
        return self._thread.start(work)

    def close(self) -> None:
        """Ends all threads, and frees the model. May be called again."""
        if self._finalizer.detach() is None or os.getpid() != self._process:
            return
        if self._thread.is_current:  # by __del__ of a user's object
            _close_elsewhere(self._thread, self._engine)
        else:
            _close(self._thread, self._engine)


def _drop(thread: LoopThread, engine: OfflineEngine, creator: threading.Thread, process: int) -> None:
    """Closes a model that nothing refers to. The memory is free at once where that does not need to wait. A fork has no
    threads to close.

    The garbage collector may call this on any thread, also on one of the engine's, which would wait for itself.
    """
    if os.getpid() != process:
        return
    if threading.current_thread() in (creator, threading.main_thread()):
        _close(thread, engine)
    else:
        _close_elsewhere(thread, engine)


def _close_elsewhere(thread: LoopThread, engine: OfflineEngine) -> None:
    threading.Thread(target=_close, args=(thread, engine), name="quire-offline-close").start()


def _close(thread: LoopThread, engine: OfflineEngine) -> None:
    thread.run(engine.close())
    thread.close()
