"""Python's garbage collector in a process that must not pause."""

import gc


def freeze_gc() -> None:
    """Take all that is there now for good, and look for new cycles seldom. To be called once a service is ready.

    Otherwise every collection of the oldest generation walks all modules, the model and its tokenizer among them, and
    steps and streams wait for it: tens of milliseconds at a time.
    """
    gc.collect()
    gc.freeze()
    # A young generation of so many objects, and the older ones after so many of the one before.
    gc.set_threshold(50_000, 20, 100)
