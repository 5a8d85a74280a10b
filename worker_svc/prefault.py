"""Page-faults the cache's memory before steps need it.

The system allocates and zeroes a page when it is first written, and a step with a new block would wait for that: near a
tenth of its time on a virtual machine whose host does the same.
"""

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable

from torch import Tensor

from worker_svc.host_memory import available_memory

BYTES_BEFORE_READY = 3 * 2**29
"""Bytes to wait for before a worker serves: what half a minute of full load fills on two cores."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_CHUNK_BYTES = 4 * 2**20  # a few milliseconds on a slow host
_SPARE_BYTES = 2**30
_PAUSE = 0.05  # seconds between checks of a busy worker

logger = logging.getLogger("quire.worker")


class Prefault:
    """Touches all pages of a contiguous tensor in a mapping of its own, on several threads that start at once.

    The contents do not change and may be read and written meanwhile. It stops early if `available` reports less than 1
    GiB, or if the system does not support it; the remaining pages are allocated when they are written.
    """

    def __init__(self, memory: Tensor, num_threads: int, available: Callable[[], int] = available_memory) -> None:
        self._memory: Tensor | None = memory
        self._num_bytes, self._available = memory.nbytes, available
        self._may_continue: Callable[[], bool] = lambda: True
        self._next = self._num_populated_bytes = 0
        self._began, self._num_running = time.monotonic(), num_threads
        self._progress = threading.Condition()  # guards the numbers above
        self._threads = [threading.Thread(target=self._run, name="prefault", daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def wait_for(self, num_bytes: int) -> None:
        """Returns when `num_bytes` bytes are done, or all that will be."""
        with self._progress:
            self._progress.wait_for(lambda: not self._num_running or self._num_populated_bytes >= num_bytes)

    def continue_while(self, is_idle: Callable[[], bool]) -> None:
        """Continues only while `is_idle` returns true."""
        self._may_continue = is_idle

    def stop(self) -> None:
        """Returns when all threads have ended, and refers to the memory no more. It takes some milliseconds."""
        self._may_continue = lambda: True
        with self._progress:
            self._next = self._num_bytes
        for thread in self._threads:
            thread.join()
        self._memory = None

    def _run(self) -> None:
        while (size := self._populate_chunk()) is not None:
            with self._progress:
                self._num_populated_bytes += size
                self._progress.notify_all()
        with self._progress:
            self._num_running -= 1
            self._progress.notify_all()
            if not self._num_running:
                seconds = round(time.monotonic() - self._began, 2)
                fields = {"bytes": self._num_populated_bytes, "of": self._num_bytes, "seconds": seconds}
                logger.info("cache is in memory", extra=fields)

    def _populate_chunk(self) -> int | None:
        """Populate the next chunk and return its size; None if there is nothing left for this thread."""
        while not self._may_continue():
            time.sleep(_PAUSE)
        with self._progress:
            start, end = self._next, min(self._next + _CHUNK_BYTES, self._num_bytes)
            if self._memory is None or start == end or self._available() < _SPARE_BYTES:
                self._next = self._num_bytes
                return None
            self._next = end
            address = self._memory.data_ptr() + start
        return end - start if _populate(address, end - start) else None


def _populate(address: int, size: int) -> bool:
    """Allocates these pages; False if the system cannot."""
    if sys.platform != "linux":
        return False
    # Not Python's mmap.madvise, which keeps the GIL during the call.
    arguments = (ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(_POPULATE_WRITE))
    return bool(ctypes.CDLL(None).madvise(*arguments) == 0)
