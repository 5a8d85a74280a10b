"""A server on this machine that a command starts, and that ends with it."""

import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import typer

from quire_client.cli.services import ATTACHED, service_command


class ServerEnded(Exception):  # noqa: N818
    """The server ended while the command needed it. The text says where its log is."""


@dataclass(frozen=True, slots=True)
class ReadyServer:
    """What a server serves, and where. `api_key` is one that it accepts, where flags gave one."""

    model: str
    generates: bool
    """Whether the model generates text; otherwise it computes values of texts."""
    address: str
    http: str
    api_key: str | None
    log: str


class ServerProcess:
    """A process with all services. It ends when its standard input does: in `with`, or however this process ends."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Starts it with flags of `quire serve`, MODEL and a prompt. Raises Exit where they are refused."""
        self._process = subprocess.Popen(
            service_command(ATTACHED, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the chat
        )
        self._ready: ReadyServer | None = None
        try:
            self.prompt: str | None = self._read()["prompt"]
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def wait_until_ready(self) -> ReadyServer:
        """Waits until it serves. Raises Exit where it fails to."""
        self._ready = ReadyServer(**self._read())
        return self._ready

    def call_at_end(self, on_end: Callable[[], None]) -> None:
        """Calls `on_end` in another thread when it ends."""

        def watch() -> None:
            self._process.wait()
            on_end()

        threading.Thread(target=watch, daemon=True).start()

    def check(self) -> None:
        """Raises ServerEnded where it has ended."""
        if self._ready is not None and (code := self._process.poll()) is not None:
            raise ServerEnded(f"the server ended (exit status {code}); its log is {self._ready.log}")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:  # it has written why to stderr
            raise typer.Exit(max(self._process.wait(), 1))
        values: dict[str, Any] = json.loads(line)
        return values

    def _stop(self) -> None:
        """Ends it in order; a second Ctrl-C kills it, and with it the services."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait()
        except KeyboardInterrupt:
            self._process.kill()
            self._process.wait()
            raise
