"""Python's garbage collector, and the C library's memory, in a process that must not pause."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock

# Objects of the young generation, and collections of a generation before one of the next.
_RARE = (50_000, 20, 100)


def freeze_gc() -> None:
    """Excludes all existing objects from collection, makes collections rare, and returns what the start has freed. To
    be called once a service is ready.

    Otherwise each collection of the oldest generation walks all modules, the model and its tokenizer, and steps and
    streams wait for it: tens of milliseconds at a time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_RARE)
    return_free_memory()


class _Users:
    """Those who want collections to be rare, and what the thresholds were before the first of them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_users = 0
        self._usual = gc.get_threshold()

    def add(self) -> None:
        """One more."""
        with self._lock:
            if not self._num_users:
                self._usual = gc.get_threshold()
                if self._usual[0]:  # 0: there are no collections
                    gc.set_threshold(*map(max, self._usual, _RARE))
            self._num_users += 1

    def remove(self) -> None:
        """One less. After the last one all is as it was."""
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                gc.set_threshold(*self._usual)


_users = _Users()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Makes collections rare in a process that is somebody else's, as `freeze_gc` does in one of ours. It excludes
    nothing from them: what the process frees later would stay. From any thread, and within one another.
    """
    _users.add()
    try:
        yield
    finally:
        _users.remove()


def return_free_memory() -> None:
    """Returns memory that was freed to the operating system, where the C library can (glibc's). It keeps it otherwise:
    a worker that has read the default model 200 MB, a process that has read its tokenizer 40.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
