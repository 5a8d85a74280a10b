"""What the supervisor says: lines, and on a terminal one more that changes, for what is being waited for."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TextIO

from svc_common.logs import console_line

_SHOWN_AFTER = 2.0
_REPEATED_AFTER = 15.0
_CLEAR_LINE = "\r\x1b[K"


class WaitStatus:
    """Something that may take long: shown after two seconds, then each second on a terminal, or now and then."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._started = monotonic()
        self._said = 0.0
        self._said_what = ""

    def show(self, what: str) -> None:
        """To be called often, with what is being waited for now."""
        seconds = monotonic() - self._started
        if seconds < _SHOWN_AFTER:
            return
        if self._console.is_terminal:
            self._console.set_status(f"{what} ({seconds:.0f} s)")
        elif what != self._said_what or seconds - self._said >= _REPEATED_AFTER:
            self._said, self._said_what = seconds, what
            self._console.write_line(f"{what} ({seconds:.0f} s)")


class Console:
    """Writes to stderr, so that stdout holds the ready line alone. A reader that is gone does not end a supervisor."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.is_terminal = self._stream.isatty()
        self._status = ""

    def write_line(self, line: str) -> None:
        """A line of the supervisor's own."""
        self._write(f"quire: {line}")

    def relay(self, role: str, line: str) -> None:
        """A line that a role wrote: a log entry for people to read, anything else as it is."""
        try:
            self._write(console_line(json.loads(line) | {"role": role}))
        except (ValueError, KeyError, TypeError):
            self._write(f"{role} | {line}")

    def announce(self, lines: list[str]) -> None:
        """What the user waited for, on stdout."""
        self.set_status("")
        with suppress(OSError):
            print("\n".join(lines), flush=True)

    @contextmanager
    def waiting(self) -> Iterator[WaitStatus]:
        """A wait that begins now; the line that changes is gone after it."""
        try:
            yield WaitStatus(self)
        finally:
            self.set_status("")

    def set_status(self, status: str) -> None:
        """The line that changes; empty takes it away. For terminals."""
        if status != self._status:
            self._status = status
            self._put(f"{_CLEAR_LINE}{status and 'quire: '}{status}")

    def _write(self, line: str) -> None:
        clear = _CLEAR_LINE if self._status else ""
        again = f"quire: {self._status}" if self._status else ""
        self._put(f"{clear}{line}\n{again}")

    def _put(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)
            self._stream.flush()
