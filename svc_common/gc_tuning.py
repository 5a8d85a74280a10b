"""Python's garbage collector in a process that must not pause."""

import gc


def freeze_gc() -> None:
    """Excludes all existing objects from collection, and makes collections rare. To be called once a service is ready.

    Otherwise each collection of the oldest generation walks all modules, the model and its tokenizer, and steps and
    streams wait for it: tens of milliseconds at a time.
    """
    gc.collect()
    gc.freeze()
    # Objects of the young generation, and collections of a generation before one of the next.
    gc.set_threshold(50_000, 20, 100)
