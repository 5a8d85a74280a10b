"""Logging of a service: readable lines on a terminal, one JSON object a line everywhere else."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from svc_common.redaction import redact

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure_logging(role: str, level: str) -> None:
    """Writes log records to stderr: Quire's from `level` (debug, info, warning, error), others' from warning."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ConsoleFormatter(role) if sys.stderr.isatty() else JsonFormatter(role))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("quire").setLevel(level.upper())
    logging.captureWarnings(True)


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
