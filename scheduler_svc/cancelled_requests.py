"""Requests that were cancelled or deleted of late. The store may have no record that says so, and a gateway that was
away submits again what this scheduler does not know.
"""

import time
from collections.abc import Callable

_SECONDS = 60.0  # as long as a gateway waits for a scheduler by default
_MAX_REQUESTS = 10_000


class CancelledRequests:
    """By key, the submission that was cancelled."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[str, tuple[str, float]] = {}  # with the time when each is dropped, oldest first

    def add(self, key: str, submission_id: str) -> None:
        """A request was cancelled or deleted. An empty submission id is any submission."""
        now = self._clock()
        self.forget(key)
        self._kept[key] = submission_id, now + _SECONDS
        while len(self._kept) > _MAX_REQUESTS or self._kept[next(iter(self._kept))][1] <= now:
            self.forget(next(iter(self._kept)))

    def forget(self, key: str) -> None:
        """Another submission has the key."""
        self._kept.pop(key, None)

    def has(self, key: str, submission_id: str) -> bool:
        """Whether a submission was cancelled or deleted."""
        kept_id, until = self._kept.get(key, ("", 0.0))
        return kept_id in ("", submission_id) and self._clock() < until
