"""The supervisor's state as a file, for tests and tools that want to know a role's process or address."""

import json
import os
from pathlib import Path
from typing import Any


class StateFile:
    """A JSON object, replaced as a whole at each change. It tells the password of Redis: only its owner reads it."""

    def __init__(self, path: Path, constant: dict[str, Any]) -> None:
        self._path = path
        self._constant = constant

    def write(self, changing: dict[str, Any]) -> None:
        """Replaces the file by what is constant and what is now."""
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(self._constant | changing, indent=2))
        draft.replace(self._path)

    def remove(self) -> None:
        """There is no supervisor any more."""
        self._path.unlink(missing_ok=True)
