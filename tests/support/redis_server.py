"""A real Redis in its own directory. It can be killed and restarted with the data that it kept."""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
        """Kills it (SIGKILL), and waits until the process has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Stops it (SIGSTOP): it keeps its connections and answers nothing."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continues it (SIGCONT)."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)


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
