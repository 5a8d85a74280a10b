"""The compiled kernels for tests: built once, where a worker would keep them."""

import functools

from quire_kernels.cpu.library import load_library
from quire_kernels.cpu.team import Team
from svc_common.models import cache_root


@functools.cache
def team(size: int = 2) -> Team:
    """Threads that share their work, though a test's is small: more than one, so that they meet."""
    return Team(load_library(cache_root() / "kernels"), size)
