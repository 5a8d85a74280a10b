"""Python's garbage collector as the service has it, for as long as something is measured."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from svc_common.garbage import settle_garbage


@contextmanager
def settled_garbage() -> Iterator[None]:
    """Leave what is there now alone, and look for new cycles as seldom as the service does."""
    threshold = gc.get_threshold()
    settle_garbage()
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
