"""The compiled kernels for tests: built once, where a worker would keep them."""

import functools

from quire_kernels.cpu.library import load_library
from quire_kernels.cpu.thread_pool import ThreadPool
from svc_common.models import cache_root


@functools.cache
def thread_pool(size: int = 2) -> ThreadPool:
    """Threads that share their work, though a test's is small: more than one, so that they meet."""
    return ThreadPool(load_library(cache_root() / "kernels"), size)
