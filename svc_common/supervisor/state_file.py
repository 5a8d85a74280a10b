"""The file in which the supervisor writes process ids and addresses of the services."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from svc_common.files import why_unreadable
from svc_common.supervisor.console import Console


class StateFileUnusable(Exception):  # noqa: N818
    """The file cannot be written at the start. The text names the setting."""


class StateFile:
    """A file that has `constant` and what changes, as JSON; no file where `path` is None."""

    def __init__(self, path: Path | None, constant: Mapping[str, Any], console: Console) -> None:
        self._path = path
        self._constant = constant
        self._console = console
        self._is_failing = False

    def create(self, state: Mapping[str, Any]) -> None:
        """Writes the file for the first time. Raises StateFileUnusable."""
        try:
            self._write(state)
        except OSError as error:
            self._is_failing = True
            raise StateFileUnusable(f"QUIRE_STATE_FILE: {self._path}: {why_unreadable(error)}") from error

    def update(self, state: Mapping[str, Any]) -> None:
        """Replaces the file. A full disk must not end the services: it is reported, once until it can be written."""
        try:
            self._write(state)
        except OSError as error:
            if not self._is_failing:
                self._console.write_line(f"{self._path} cannot be written: {why_unreadable(error)}")
            self._is_failing = True
        else:
            self._is_failing = False

    def remove(self) -> None:
        """Removes the file."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _write(self, state: Mapping[str, Any]) -> None:
        """Only its owner may read it: it has the password of Redis."""
        if self._path is None:
            return
        draft = self._path.parent / f".{self._path.name}.{os.getpid()}"
        try:
            draft.touch(mode=0o600)
            draft.write_text(json.dumps({**self._constant, **state}, indent=2))
            draft.replace(self._path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise
