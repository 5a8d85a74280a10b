"""Takes the cache's memory from the system before steps need it.

The system gives memory when it is first written, and zeroes it then: steps that come to a new block would wait for
that, on a virtual machine whose host does the same for near a tenth of their time.
"""

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable

from torch import Tensor

from worker_svc.host import available_memory

BYTES_BEFORE_READY = 3 * 2**29
"""Bytes to wait for before a worker serves: what half a minute of full load fills on two cores."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_CHUNK_BYTES = 4 * 2**20  # a few milliseconds where the host is slow
_SPARE_BYTES = 2**30
_PAUSE = 0.05  # seconds between looks at a worker that is busy

logger = logging.getLogger("quire.worker")


class Prefault:
    """Takes all of the memory, a contiguous tensor in a mapping of its own, on as many threads, which begin at once.

    What the memory holds stays as it is, and may be read and written meanwhile. It ends early where the machine is left
    with less than a GiB, of which `available` tells, or where the system cannot do it: the rest is taken as it is
    written.
    """

    def __init__(self, memory: Tensor, num_threads: int, available: Callable[[], int] = available_memory) -> None:
        self._memory, self._available = memory, available
        self._may_continue: Callable[[], bool] = lambda: True
        self._next = self._num_populated_bytes = 0
        self._began, self._num_running = time.monotonic(), num_threads
        self._progress = threading.Condition()  # over the numbers above
        for _ in range(num_threads):
            threading.Thread(target=self._run, name="prefault", daemon=True).start()

    def wait_for(self, num_bytes: int) -> None:
        """Return when so much is taken, or all that will be."""
        with self._progress:
            self._progress.wait_for(lambda: not self._num_running or self._num_populated_bytes >= num_bytes)

    def continue_while(self, is_idle: Callable[[], bool]) -> None:
        """Take the rest only in moments in which this says so."""
        self._may_continue = is_idle

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
                fields = {"bytes": self._num_populated_bytes, "of": self._memory.nbytes, "seconds": seconds}
                logger.info("cache is in memory", extra=fields)

    def _populate_chunk(self) -> int | None:
        """Its size, or None: there is no more to take, or none for this thread."""
        while not self._may_continue():
            time.sleep(_PAUSE)
        with self._progress:
            start, end = self._next, min(self._next + _CHUNK_BYTES, self._memory.nbytes)
            if start == end or self._available() < _SPARE_BYTES:
                self._next = self._memory.nbytes
                return None
            self._next = end
        return end - start if _populate(self._memory.data_ptr() + start, end - start) else None


def _populate(address: int, size: int) -> bool:
    """Have the system give these pages; False where it cannot."""
    if sys.platform != "linux":
        return False
    # Not the method of Python's mmap: that keeps the interpreter's lock while the system is at it.
    arguments = (ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(_POPULATE_WRITE))
    return bool(ctypes.CDLL(None).madvise(*arguments) == 0)
