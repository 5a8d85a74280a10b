"""What a response of a server means for a request of a batch, and how long to wait before it is sent again."""

import json
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum

MAX_ERRORS = 5
"""Internal errors of one request, with the timeouts of one that has no name, after which the last is its answer."""

_FIRST_BACKOFF, _MAX_BACKOFF = 0.5, 10.0  # seconds
_MAX_WAIT = 300.0
"""Seconds. A longer `Retry-After` counts as this one."""
_DENIED = (401, 403)
# Of 502 and 504, a proxy is the usual sender: its gateway is away, or takes longer than the proxy waits.
_LATER = (408, 425, 429, 502, 503, 504)
_CANCELLED = 499
_NAME_UNUSABLE = ("idempotency_key_reused", "request_lost")


class NextStep(Enum):
    """What to do after a response."""

    WRITE = "the response is the answer"
    RETRY = "send the request again, as often as it takes"
    RETRY_FEW = "send it again, MAX_ERRORS times"
    RENAME = "send it again under another name"
    END = "no request of the batch can be answered like this"


def next_step(status: int, headers: Mapping[str, str], body: bytes) -> NextStep:
    """What follows from a response. Names of `headers` are case-insensitive or in lower case."""
    if status in _DENIED or 300 <= status < 400:
        return NextStep.END
    if status >= 400 and _error_code(body) in _NAME_UNUSABLE:
        return NextStep.RENAME
    if status < 400 or headers.get("x-should-retry", "").lower() == "false":
        return NextStep.WRITE
    if status in _LATER:
        return NextStep.RETRY
    return NextStep.RETRY_FEW if status == _CANCELLED or status >= 500 else NextStep.WRITE


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds of `Retry-After`, which is a number or a date. None: there is no such header, or it is neither."""
    text = headers.get("retry-after", "")
    if text.isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
        return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    except (ValueError, OverflowError):  # a year or an offset that datetime cannot hold
        return None


def waiting_time(num_calls: int, requested: float | None) -> float:
    """Seconds to wait after this many calls, at least 1: 0.25 to 10 s, or `requested` if that is longer; at most 330 s.

    Random, so that not all requests of a batch are sent again at once.
    """
    backoff = min(_FIRST_BACKOFF * 2.0 ** min(num_calls - 1, 16), _MAX_BACKOFF) * random.uniform(0.5, 1.0)
    return max(backoff, min(requested or 0.0, _MAX_WAIT) * random.uniform(1.0, 1.1))


def _error_code(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return None
