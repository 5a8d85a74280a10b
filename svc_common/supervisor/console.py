"""The supervisor's output: lines, and on a terminal a status line for what is waited for."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TextIO

from svc_common.logs import console_line
from svc_common.redaction import redact

_SHOWN_AFTER = 2.0
_REPEATED_AFTER = 15.0
_UNWRITABLE = (OSError, UnicodeEncodeError)
"""Errors of a pipe that is closed, of a full disk, and of text that the locale's encoding does not have."""
_CLEAR_LINE = "\r\x1b[K"


class WaitStatus:
    """Progress of a wait: shown after two seconds, then each second on a terminal, else every 15 seconds."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._started = monotonic()
        self._last_shown = 0.0
        self._last_text = ""

    def show(self, what: str) -> None:
        """To be called often, with what is waited for now."""
        seconds = monotonic() - self._started
        if seconds < _SHOWN_AFTER:
            return
        if self._console.is_terminal:
            self._console.set_status(f"{what} ({seconds:.0f} s)")
        elif what != self._last_text or seconds - self._last_shown >= _REPEATED_AFTER:
            self._last_shown, self._last_text = seconds, what
            self._console.write_line(f"{what} ({seconds:.0f} s)")


class Console:
    """Writes to stderr, without credentials of URLs; only the ready lines go to stdout. A closed pipe does not end the
    supervisor.
    """

    def __init__(self, stream: TextIO | None = None, status_stream: TextIO | None = None) -> None:
        """Lines go to `stream` instead, and the status line, if that is a terminal, to `status_stream` instead."""
        self._stream = stream or sys.stderr
        self._status_stream = status_stream or self._stream
        self.is_terminal = self._status_stream.isatty()
        self._status = ""

    def write_line(self, line: str) -> None:
        self._write(f"quire: {line}")

    def relay(self, role: str, line: str) -> None:
        """Writes a line of a role: a JSON log entry in readable form, anything else unchanged."""
        try:
            text = console_line(json.loads(line) | {"role": role})
        except Exception:  # an exception here would end the relay, and the role would wait to write more
            text = f"{role} | {line}"
        self._write(text)

    def announce(self, lines: list[str]) -> None:
        """Writes lines to stdout."""
        self.set_status("")
        with suppress(*_UNWRITABLE):
            print("\n".join(lines), flush=True)

    @contextmanager
    def waiting(self) -> Iterator[WaitStatus]:
        """A wait; the status line is cleared at its end."""
        try:
            yield WaitStatus(self)
        finally:
            self.set_status("")

    def set_status(self, status: str) -> None:
        """Sets the status line of a terminal; empty clears it."""
        if status != self._status:
            self._status = status
            _put(self._status_stream, f"{_CLEAR_LINE}{status and 'quire: '}{status}")

    def _write(self, line: str) -> None:
        line = redact(line)
        has_status = self._status and self._status_stream is self._stream
        clear = _CLEAR_LINE if has_status else ""
        again = f"quire: {self._status}" if has_status else ""
        _put(self._stream, f"{clear}{line}\n{again}")


def _put(stream: TextIO, text: str) -> None:
    with suppress(*_UNWRITABLE):
        stream.write(text)
        stream.flush()
