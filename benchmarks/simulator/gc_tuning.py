"""Python's garbage collector as the service has it, for as long as something is measured."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from svc_common.gc_tuning import freeze_gc


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Leave what is there now alone, and look for new cycles as seldom as the service does."""
    threshold = gc.get_threshold()
    freeze_gc()
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
