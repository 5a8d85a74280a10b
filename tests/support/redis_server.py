"""A real Redis in its own directory. It can be killed and restarted with the data that it kept."""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import redis

from ports import lasting_port
from svc_common.supervisor.embedded_redis import EmbeddedRedis


class RedisServer:
    """A server on a free port; it runs the embedded executable by default."""

    def __init__(self, directory: Path, executable: str | None = None) -> None:
        embedded = EmbeddedRedis.prepare(directory, lasting_port())
        if executable is not None:
            embedded = replace(embedded, command=(executable, *embedded.command[1:]))
        self.url = embedded.url
        self._command = embedded.command
        self._process: subprocess.Popen[bytes] | None = None
        self._is_paused = False

    def start(self) -> None:
        """Starts it, and waits until it answers and has loaded its data."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        with redis.Redis.from_url(self.url) as client:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                try:
                    client.ping()
                    return
                except redis.exceptions.ConnectionError:
                    time.sleep(0.01)
        raise AssertionError("redis does not answer")

    def kill(self) -> None:
        """Kills it (SIGKILL) when what it has acknowledged is in its file, unless it is paused, and waits until the
        process has ended."""
        if self._process is not None:
            if self._process.poll() is None and not self._is_paused:
                self._until_written()
            self._process.kill()
            self._process.wait()
            self._is_paused = False

    def pause(self) -> None:
        """Stops it (SIGSTOP): it keeps its connections and answers nothing."""
        if self._process is not None:
            self._is_paused = True
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continues it (SIGCONT)."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._is_paused = False

    def _until_written(self) -> None:
        """While the disk is busy, Redis keeps what it has acknowledged in memory for up to 2 s."""
        end = time.monotonic() + 60
        # A test may have made it refuse or ignore commands; then no test expects anything of its file.
        with redis.Redis.from_url(self.url, socket_timeout=5) as client, suppress(redis.exceptions.RedisError):
            while client.info("persistence").get("aof_buffer_length"):
                assert time.monotonic() < end, "redis does not write its file"
                time.sleep(0.01)


@contextmanager
def running_server(directory: Path, executable: str | None = None) -> Iterator[RedisServer]:
    """A server that runs until the end of the block."""
    server = RedisServer(directory, executable)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """The URL of an embedded server that runs until the end of the block."""
    with running_server(directory) as server:
        yield server.url
