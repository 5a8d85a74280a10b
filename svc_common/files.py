"""Files that settings name: whether they have changed, why one cannot be read, and reading one again."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger("quire.boundary")

RELOAD_SECONDS = 2.0
"""Seconds between two looks at a file."""

T = TypeVar("T")

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


def may_others_access(mode: int) -> bool:
    """Whether users other than a file's owner and group may read, write or execute it, by its mode."""
    return bool(mode & 0o007)


def why_unreadable(error: OSError) -> str:
    """The system's reason in lower case, for an error that begins with the path."""
    return (error.strerror or str(error)).lower()


class ReloadedFile(Generic[T]):
    """What was read from a file, which is read again when it changes. `refresh` may be called from any one thread."""

    def __init__(self, path: Path, what: str, read: Callable[[Path, T | None], T], unusable: type[Exception]) -> None:
        """`read` gets the path, and what was read before. It raises `unusable` for a file that cannot be used, as this
        does. `what` names the contents in the log.
        """
        self._path = path
        self._what = what
        self._read = read
        self._unusable = unusable
        self._version = file_version_if_any(path)
        self.current = read(path, None)

    def refresh(self) -> None:
        """Reads the file if it has changed. If it cannot be used, this is logged, and the earlier contents stay."""
        version = file_version_if_any(self._path)
        if version == self._version:
            return
        try:
            contents = self._read(self._path, self.current)
        except self._unusable as error:
            if version == file_version_if_any(self._path):
                self._version = version
                why = {"why": str(error)}
                logger.warning(f"the changed file of {self._what} cannot be used; the earlier ones stay", extra=why)
            return
        if version == file_version_if_any(self._path):  # else it changes at this moment, and the next call reads it
            self.current, self._version = contents, version
            logger.info(f"the file of {self._what} was read again", extra={"path": str(self._path)})


async def refresh_once(refresh: Callable[[], None]) -> None:
    """Calls a function in a thread. Its exceptions are logged: what others write or send ends no process."""
    try:
        await asyncio.to_thread(refresh)
    except Exception:
        logger.exception("keys cannot be read; the earlier ones stay")


async def keep_refreshed(*refreshes: Callable[[], None]) -> None:
    """Calls functions every RELOAD_SECONDS, for ever. One that takes long does not delay the others."""

    async def repeat(refresh: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            await refresh_once(refresh)

    await asyncio.gather(*map(repeat, refreshes))
