"""Takes the cache's memory from the system before steps do.

The system gives memory when it is first written, and zeroes it then: steps that came to a new block would wait for
that, on a virtual machine whose host does the same for a tenth of their time.
"""

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable

from torch import Tensor

from worker_svc.host import available_memory

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_CHUNK_BYTES = 64 * 2**20
_SPARE_BYTES = 2**30

logger = logging.getLogger("quire.worker")


def prefault(memory: Tensor, available: Callable[[], int] = available_memory) -> threading.Thread:
    """Begin to take all of the memory, a contiguous tensor in a mapping of its own; on a thread, which is returned.

    What it holds stays as it is, and may be read and written meanwhile. It ends early where the machine is left with
    less than a GiB, of which `available` tells, or where the system cannot do it: the rest is taken as it is written.
    """
    thread = threading.Thread(target=_populate, args=(memory, available), name="prefault", daemon=True)
    thread.start()
    return thread


def _populate(memory: Tensor, available: Callable[[], int]) -> None:
    if sys.platform != "linux":
        return
    # Not the method of Python's mmap: that keeps the interpreter's lock while the system is at it.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    began, taken = time.monotonic(), 0
    while taken < memory.nbytes and available() >= _SPARE_BYTES:
        size = min(_CHUNK_BYTES, memory.nbytes - taken)
        if madvise(memory.data_ptr() + taken, size, _POPULATE_WRITE) != 0:
            break
        taken += size
    seconds = round(time.monotonic() - began, 2)
    logger.info("cache is in memory", extra={"bytes": taken, "of": memory.nbytes, "seconds": seconds})
