"""Python's garbage collector tuned as in the services, during a measurement."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from svc_common.gc_tuning import freeze_gc


@contextmanager
def frozen_gc() -> Iterator[None]:
    """`freeze_gc`, undone at the end."""
    threshold = gc.get_threshold()
    freeze_gc()
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
