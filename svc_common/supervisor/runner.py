"""Keeps one role running: starts it, probes it, restarts it when it dies, and ends it."""

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from svc_common.files import why_unreadable
from svc_common.settings import BAD_SETTINGS
from svc_common.supervisor.console import Console
from svc_common.supervisor.launch import launch_command
from svc_common.supervisor.roles import Role

_NUM_LAST_LINES = 20
_MAX_DOUBLINGS = 30
_OUTPUT_DRAIN_SECONDS = 1.0
"""How long output is read after a process ended: a child of its own may hold the pipe open."""

_LONGEST_LINE = 2**20
"""Bytes of output without an end of line that are taken for a line."""


class RoleState(StrEnum):
    """starting → ready; from both → waiting (it died and will be restarted) → starting; at last → ended."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    ENDED = "ended"


@dataclass(frozen=True)
class RestartPolicy:
    """When a dead role is restarted: at once the first time, then after delays that double. All in seconds."""

    initial_backoff: float = 0.5
    max_backoff: float = 10.0
    stable_after: float = 30.0
    """A role that was up for so long is restarted at once again."""
    attempts: int = 3
    """Deaths of a role that never answered, after which it is not restarted."""
    probe_interval: float = 0.2

    def wait(self, num_exits: int) -> float:
        """Seconds from the death of this number, from 1, to the restart."""
        if num_exits == 1:
            return 0.0
        return min(self.initial_backoff * 2.0 ** min(num_exits - 2, _MAX_DOUBLINGS), self.max_backoff)


class RoleFailed(Exception):  # noqa: N818
    """A role died repeatedly before it ever answered, or cannot start with its settings."""

    def __init__(self, role: str, why: str, last_lines: list[str]) -> None:
        super().__init__(f"{role} {why}")
        self.role = role
        self.last_lines = last_lines


class RoleRunner:
    """One role. `on_change` is called at each change of its state."""

    def __init__(self, role: Role, policy: RestartPolicy, console: Console, on_change: Callable[[], None]) -> None:
        self.role = role
        self.state = RoleState.STARTING
        self.num_restarts = 0
        self.ready = asyncio.Event()
        """Set at its first answer; a later death does not clear it."""
        self._policy = policy
        self._console = console
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._relaying: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)

    @property
    def pid(self) -> int | None:
        """The running process; None while there is none."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Starts the role, and restarts it whenever it dies, until cancelled. Raises RoleFailed."""
        num_exits = 0
        while True:
            started, status = time.monotonic(), None
            try:
                process = await self._start()
            except (OSError, RuntimeError) as error:  # RuntimeError: there are too many threads
                died = f"could not be started ({_why(error)})"
            else:
                status = await self._serve(process)
                died = f"died ({_describe(status)})"
            if time.monotonic() - started >= self._policy.stable_after:
                num_exits = 0
            num_exits += 1
            if not self.ready.is_set() and (status == BAD_SETTINGS or num_exits >= self._policy.attempts):
                raise RoleFailed(self.role.name, f"{died} and never answered", list(self._last_lines))
            wait = self._policy.wait(num_exits)
            when = f"in {wait:g} s" if wait else "at once"
            self._console.write_line(f"{self.role.name} {died}; starting it again {when}")
            self.num_restarts += 1
            self._change(RoleState.WAITING)
            await asyncio.sleep(wait)

    async def stop(self, seconds: float) -> None:
        """Sends SIGTERM, and after `seconds` SIGKILL to the whole process group. `run` must be cancelled before."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), seconds)
            except TimeoutError:
                self._console.write_line(f"{self.role.name} did not end in {seconds:g} s and is killed")
                self.kill()
                await self._process.wait()
        self._process = None
        if self._relaying is not None:
            await asyncio.wait([self._relaying], timeout=_OUTPUT_DRAIN_SECONDS)
            self._relaying.cancel()
        self._change(RoleState.ENDED)

    def kill(self) -> None:
        """Sends SIGKILL to the process group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _start(self) -> asyncio.subprocess.Process:
        """Starts the process. Raises OSError and RuntimeError where the system has no room for it."""
        return await asyncio.create_subprocess_exec(
            *launch_command(self.role.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | dict(self.role.environment),
            # Its own group: Ctrl-C reaches the supervisor alone, and the role can be killed with its children.
            process_group=0,
        )

    async def _serve(self, process: asyncio.subprocess.Process) -> int:
        """Keeps the process until it ends, and returns its exit status."""
        assert process.stdout is not None
        self._process = process
        self._change(RoleState.STARTING)
        self._relaying = asyncio.create_task(self._relay(process.stdout))
        probing = asyncio.create_task(self._probe())
        try:
            status = await process.wait()
            # Its last lines say why it died.
            await asyncio.wait([self._relaying], timeout=_OUTPUT_DRAIN_SECONDS)
        finally:
            probing.cancel()
        self._process = None
        return status

    async def _probe(self) -> None:
        started = time.monotonic()
        while not await self.role.probe():  # noqa: ASYNC110 (another process cannot set an event)
            await asyncio.sleep(self._policy.probe_interval)
        if self.ready.is_set():
            self._console.write_line(f"{self.role.name} answers again after {time.monotonic() - started:.1f} s")
        self.ready.set()
        self._change(RoleState.READY)

    async def _relay(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while data := await stream.read(2**16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(line)
            if len(rest) >= _LONGEST_LINE:
                self._take(rest)
                rest = b""
        if rest:
            self._take(rest)

    def _take(self, data: bytes) -> None:
        line = data.decode(errors="replace").rstrip()
        self._last_lines.append(line)
        if self.role.shows_output:
            self._console.relay(self.role.name, line)

    def _change(self, state: RoleState) -> None:
        self.state = state
        self._on_change()


def _why(error: Exception) -> str:
    return why_unreadable(error) if isinstance(error, OSError) else str(error)


def _describe(status: int) -> str:
    """An exit status, or the signal that ended the process."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
