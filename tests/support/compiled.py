"""The compiled kernels for tests, built once, in the worker's own cache directory."""

import functools

from quire_kernels.cpu.library import load_library
from quire_kernels.cpu.thread_pool import ThreadPool
from svc_common.models import cache_root


@functools.cache
def thread_pool(size: int = 2) -> ThreadPool:
    """Threads, more than one, so that small tests also run in parallel."""
    return ThreadPool(load_library(cache_root() / "kernels"), size)
