"""Logging of a service: readable lines on a terminal, one JSON object a line everywhere else."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from svc_common.redaction import redact

_REPEAT_SECONDS = 10.0
"""Seconds between two lines of a library with the same message: clients can make it log for each request."""
_MAX_REPEATS = 256  # messages that are remembered

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure_logging(role: str, level: str) -> None:
    """Writes log records to stderr: Quire's from `level` (debug, info, warning, error), others' from warning."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ConsoleFormatter(role) if sys.stderr.isatty() else JsonFormatter(role))
    handler.addFilter(FewRepeats())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("quire").setLevel(level.upper())
    logging.captureWarnings(True)


class FewRepeats(logging.Filter):
    """Drops a library's warning that had the same message in the last _REPEAT_SECONDS; the next one has the number of
    those in between. Errors, and what Quire itself logs, pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}
        """When a message was logged, and how often it was dropped since, by logger and message without its values."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR or record.name.partition(".")[0] == "quire":
            return True
        which, now = (record.name, str(record.msg)), self._clock()
        logged_at, num_dropped = self._logged.get(which, (-math.inf, 0))
        if now < logged_at + _REPEAT_SECONDS:
            self._logged[which] = logged_at, num_dropped + 1
            return False
        if which not in self._logged and len(self._logged) >= _MAX_REPEATS:
            self._logged.clear()
        self._logged[which] = now, 0
        if num_dropped:
            record.num_dropped = num_dropped
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


def console_line(entry: dict[str, Any]) -> str:
    """A JSON log entry as a readable line; an exception's traceback follows on further lines."""
    rest = dict(entry)
    moment = datetime.fromisoformat(rest.pop("ts")).astimezone()
    role, level, event = rest.pop("role"), rest.pop("level"), rest.pop("event")
    rest.pop("logger", None)
    exception = rest.pop("exception", None)
    values = "".join(f" {key}={value}" for key, value in rest.items())
    line = f"{moment:%H:%M:%S} {role:<9} {level:<7} {event}{values}"
    return f"{line}\n{exception}" if exception else line
