"""Calls without a valid credential: a counter, and a line in the log now and then."""

import logging
import time
from collections.abc import Callable
from enum import StrEnum

from prometheus_client import Counter

logger = logging.getLogger("quire.gateway")

LOG_SECONDS = 10.0
"""Seconds between two log lines: anybody can make calls fail, and they must not fill the log."""


class LoginFailure(StrEnum):
    """Why a call is not authenticated."""

    MISSING = "missing"
    MALFORMED = "malformed"
    CONFLICTING = "conflicting"
    UNKNOWN = "unknown"
    EXPIRED = "expired"


class FailedLogins:
    """Counts failed logins, and logs the first one and then at most one in LOG_SECONDS, with the number in between."""

    def __init__(self, counter: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        """`counter` has the labels protocol and reason."""
        self._counter = counter
        self._clock = clock
        self._num_unlogged = 0
        self._logged_at: float | None = None

    def note(self, protocol: str, failure: LoginFailure, peer: str, account: str | None = None) -> None:
        """A call failed. `peer` is the client's address; `account` is that of the key, where it is known."""
        self._counter.labels(protocol, failure.value).inc()
        self._num_unlogged += 1
        now = self._clock()
        if self._logged_at is not None and now < self._logged_at + LOG_SECONDS:
            return
        about: dict[str, object] = {"num_failed": self._num_unlogged, "protocol": protocol, "reason": failure.value}
        about["peer"] = peer
        if account is not None:
            about["account"] = account
        logger.warning("calls without a valid credential", extra=about)
        self._num_unlogged, self._logged_at = 0, now
