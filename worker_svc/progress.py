"""Reports that something which takes long is still running."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_SECONDS = 2.0
NEXT_SECONDS = 5.0


@contextmanager
def progress(
    label: str, report: Callable[[str], None], share: Callable[[], float | None] = lambda: None
) -> Iterator[None]:
    """Reports `label` after two seconds, the elapsed time every five seconds, and the end unless the block raises.

    Nothing is reported for what takes less. Each line has the elapsed time, and the percentage where `share` returns a
    number from 0 to 1. Both functions are called on another thread.
    """
    done = threading.Event()
    started = time.monotonic()
    has_reported = False

    def report_periodically() -> None:
        nonlocal has_reported
        wait = FIRST_SECONDS
        while not done.wait(wait):
            has_reported = True
            done_so_far = share()
            percent = "" if done_so_far is None else f", {done_so_far:.0%}"
            report(f"{label}: {time.monotonic() - started:.0f} s{percent}")
            wait = NEXT_SECONDS

    reporter = threading.Thread(target=report_periodically, name="progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()
    if has_reported:
        report(f"{label}: done in {time.monotonic() - started:.0f} s")
