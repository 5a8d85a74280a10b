"""Whether directories can be written, without writing to them."""

import os
from pathlib import Path


def existing(path: Path) -> Path:
    """The path, or the lowest one above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def is_writable(path: Path) -> bool:
    """Whether files can be written in a directory, or in one that can be made there."""
    place = existing(path)
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
