"""Python's garbage collector, and the C library's memory, in a process that must not pause."""

import ctypes
import gc
from contextlib import suppress


def freeze_gc() -> None:
    """Excludes all existing objects from collection, makes collections rare, and returns what the start has freed. To
    be called once a service is ready.

    Otherwise each collection of the oldest generation walks all modules, the model and its tokenizer, and steps and
    streams wait for it: tens of milliseconds at a time.
    """
    gc.collect()
    gc.freeze()
    # Objects of the young generation, and collections of a generation before one of the next.
    gc.set_threshold(50_000, 20, 100)
    return_free_memory()


def return_free_memory() -> None:
    """Returns memory that was freed to the operating system, where the C library can (glibc's). It keeps it otherwise:
    a worker that has read the default model 200 MB, a process that has read its tokenizer 40.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
