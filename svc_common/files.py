"""Files that settings name: whether they have changed, and why one cannot be read."""

from pathlib import Path

FileVersion = tuple[int, int, int]
"""Modification time in nanoseconds, inode, size."""


def file_version(path: Path) -> FileVersion:
    """What differs after a file was written or replaced. Raises OSError."""
    status = path.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size


def file_version_if_any(path: Path) -> FileVersion | None:
    """The same; None while there is no file that can be looked at."""
    try:
        return file_version(path)
    except OSError:
        return None


def why_unreadable(error: OSError) -> str:
    """The system's reason in lower case, for an error that begins with the path."""
    return (error.strerror or str(error)).lower()
