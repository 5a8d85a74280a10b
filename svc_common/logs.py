"""Logging of a service: readable lines on a terminal, one JSON object a line everywhere else."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from svc_common.redaction import redact

_REPEAT_SECONDS = 10.0
"""Seconds between the first two lines of a library with the same message: clients can make it log for each request."""
_MAX_REPEAT_SECONDS = 600.0
"""The most between two later ones: a collector of traces may be away for days."""
_MAX_REPEATS = 256  # messages that are remembered

_UNPRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Line breaks, control characters, and those that change the direction of text: a client may choose what is logged."""

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure_logging(role: str, level: str) -> None:
    """Writes log records to stderr: Quire's from `level` (debug, info, warning, error), others' from warning."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ConsoleFormatter(role) if sys.stderr.isatty() else JsonFormatter(role))
    handler.addFilter(FewRepeats())
    handler.addFilter(is_no_closed_handshake)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("quire").setLevel(level.upper())
    logging.captureWarnings(True)


def is_no_closed_handshake(record: logging.LogRecord) -> bool:
    """False for the error with a stack trace that uvloop logs where a TLS connection is closed during its handshake, as
    after a timeout, and bytes of it arrive after that. The code that closed the connection logs why.
    """
    error = record.exc_info[1] if record.exc_info else None
    is_of_tls = record.name == "asyncio" and str(record.msg).startswith("Fatal error on SSL protocol")
    return not (is_of_tls and isinstance(error, RuntimeError) and str(error).endswith("the handler is closed"))


@dataclass(frozen=True, slots=True)
class _Repeats:
    """A message that was logged at `logged_at`, and is dropped for `seconds`; `num_dropped` were since."""

    logged_at: float
    seconds: float
    num_dropped: int = 0

    def next_seconds(self, now: float) -> float:
        """Twice as long where the message goes on; as at first after a pause."""
        goes_on = now < self.logged_at + 2 * self.seconds
        return min(2 * self.seconds, _MAX_REPEAT_SECONDS) if goes_on else _REPEAT_SECONDS


class FewRepeats(logging.Filter):
    """Drops a library's message that repeats an earlier one: for _REPEAT_SECONDS, and for twice as long each time that
    it goes on. The next one has the number of those in between. Stack traces, and what Quire itself logs, pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged: dict[tuple[str, str], _Repeats] = {}
        """By logger and message without its values."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info or record.name.partition(".")[0] == "quire":
            return True
        which, now = (record.name, str(record.msg)), self._clock()
        earlier = self._logged.get(which)
        if earlier is None:
            if len(self._logged) >= _MAX_REPEATS:
                self._logged.clear()
            self._logged[which] = _Repeats(now, _REPEAT_SECONDS)
            return True
        if now < earlier.logged_at + earlier.seconds:
            self._logged[which] = replace(earlier, num_dropped=earlier.num_dropped + 1)
            return False
        self._logged[which] = _Repeats(now, earlier.next_seconds(now))
        if earlier.num_dropped:
            record.num_dropped = earlier.num_dropped
        return True


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: ts (UTC), level, event, role, logger, and the fields of `extra`.

    Credentials of URLs are replaced, in exceptions also.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def entry(self, record: logging.LogRecord) -> dict[str, Any]:
        """The record's values by key."""
        moment = datetime.fromtimestamp(record.created, UTC)
        entry: dict[str, Any] = {
            "ts": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "role": self._role,
            "logger": record.name,
        }
        entry |= {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return {key: redact(value) if isinstance(value, str) else value for key, value in entry.items()}

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.entry(record), default=lambda value: redact(str(value)), ensure_ascii=False)


class ConsoleFormatter(JsonFormatter):
    """A readable record: local time, role, level, event, then key=value."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(console_line(self.entry(record)))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def console_line(entry: dict[str, Any]) -> str:
    """A JSON log entry as a readable line; an exception's traceback follows on further lines."""
    rest = dict(entry)
    moment = datetime.fromisoformat(rest.pop("ts")).astimezone()
    role, level, event = rest.pop("role"), rest.pop("level"), rest.pop("event")
    rest.pop("logger", None)
    exception = rest.pop("exception", None)
    values = "".join(f" {key}={value}" for key, value in rest.items())
    line = f"{moment:%H:%M:%S} {role:<9} {level:<7} {_UNPRINTED.sub(_escape, f'{event}{values}')}"
    return f"{line}\n{exception}" if exception else line
