"""What a response of a server means for a request of a batch, and how long to wait before it is sent again."""

import json
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum

MAX_ERRORS = 5
"""Internal errors of one request, after which the last one is its answer."""

_FIRST_BACKOFF, _MAX_BACKOFF = 0.5, 10.0  # seconds
_DENIED = (401, 403)
# Of 502 and 504, a proxy is the usual sender: its gateway is away, or takes longer than the proxy waits.
_LATER = (408, 425, 429, 502, 503, 504)
_CANCELLED = 499
_NAME_IN_VAIN = ("idempotency_key_reused", "request_lost")


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
    if status >= 400 and _error_code(body) in _NAME_IN_VAIN:
        return NextStep.RENAME
    if status < 400 or headers.get("x-should-retry", "").lower() == "false":
        return NextStep.WRITE
    if status in _LATER:
        return NextStep.RETRY
    return NextStep.RETRY_FEW if status == _CANCELLED or status >= 500 else NextStep.WRITE


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that a response asks to wait, as a number or a date. None: it does not ask."""
    text = headers.get("retry-after", "")
    if text.isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def waiting_time(num_failures: int, asked: float | None) -> float:
    """Seconds to wait after this many failures in a row, at least 1: what the server asks, or else 0.25 to 10 s.

    Random, so that not all requests of a batch are sent again at once.
    """
    if asked is not None:
        return asked * random.uniform(1.0, 1.1)
    return float(min(_FIRST_BACKOFF * 2 ** min(num_failures - 1, 16), _MAX_BACKOFF) * random.uniform(0.5, 1.0))


def _error_code(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return None
