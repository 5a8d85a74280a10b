"""Calls without a valid credential: why they are refused, a counter, and a line in the log now and then."""

import logging
import time
from collections.abc import Callable
from enum import StrEnum

from prometheus_client import Counter

from svc_common.errors import QuireError, Reason

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
    INVALID_TOKEN = "invalid_token"


_MESSAGES = {
    LoginFailure.MISSING: "an API key is required: authorization: Bearer …",
    LoginFailure.MALFORMED: "an API key is required: authorization must be `Bearer KEY`",
    LoginFailure.CONFLICTING: "the call has two different API keys",
    LoginFailure.UNKNOWN: "the API key is not known",
    LoginFailure.EXPIRED: "the API key has expired",
    LoginFailure.INVALID_TOKEN: "the token is not valid",
}


class LoginRefused(QuireError):  # noqa: N818
    """A call without a valid credential. `account` is that of its key, where the key is known."""

    def __init__(self, failure: LoginFailure, message: str | None = None, account: str | None = None) -> None:
        super().__init__(Reason.UNAUTHENTICATED, message or _MESSAGES[failure])
        self.failure = failure
        self.account = account


class FailedLogins:
    """Counts failed logins, and logs the first one and then at most one in LOG_SECONDS, with the number in between."""

    def __init__(self, counter: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        """`counter` has the labels protocol and reason."""
        self._counter = counter
        self._clock = clock
        self._num_unlogged = 0
        self._logged_at: float | None = None

    def note(self, protocol: str, refusal: LoginRefused, peer: str) -> None:
        """A call was refused. `peer` is the client's address."""
        self._counter.labels(protocol, refusal.failure.value).inc()
        self._num_unlogged += 1
        now = self._clock()
        if self._logged_at is not None and now < self._logged_at + LOG_SECONDS:
            return
        about = {
            "num_failed": self._num_unlogged,
            "protocol": protocol,
            "reason": refusal.failure.value,
            "why": refusal.message,
            "peer": peer,
        }
        if refusal.account is not None:
            about["account"] = refusal.account
        logger.warning("calls without a valid credential", extra=about)
        self._num_unlogged, self._logged_at = 0, now
