"""A command in a terminal of its own, with a keyboard and a screen."""

import asyncio
import os
import pty
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from environments import ROOT

CTRL_C = "\x03"
CTRL_D = "\x04"

# Makes standard input the controlling terminal, which Ctrl-C needs: in the new process, because grpc forbids fork.
_PROGRAM = """
import fcntl, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
{before}
sys.argv[0] = "quire"
runpy.run_module("quire_client", run_name="__main__")
"""


class Terminal:
    """A process, its keyboard and its screen."""

    def __init__(self, process: asyncio.subprocess.Process, keyboard_and_screen: int) -> None:
        self.process = process
        self._device = keyboard_and_screen
        self._unread = ""

    async def shows(self, text: str, seconds: float = 60) -> str:
        """Waits until the screen shows `text`, at most `seconds` between changes; returns the new output up to it."""
        while text not in self._unread:
            try:
                data = await asyncio.wait_for(asyncio.to_thread(os.read, self._device, 4096), seconds)
            except TimeoutError:
                raise AssertionError(f"the screen showed {self._unread!r} and no {text!r}") from None
            except OSError:  # the other end is closed
                data = b""
            assert data, f"the screen showed {self._unread!r} and no {text!r}"
            self._unread += data.decode()
        shown, _, self._unread = self._unread.partition(text)
        return shown

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._device, keys.encode())

    async def exit_code(self) -> int:
        """Waits for the end."""
        return await asyncio.wait_for(self.process.wait(), 60)


@asynccontextmanager
async def quire_in_terminal(*arguments: str, before: str = "") -> AsyncIterator[Terminal]:
    """Runs `quire` with these arguments, after the Python code `before` in the same process. Kills it at the end."""
    ours, theirs = pty.openpty()
    paths = os.pathsep.join(str(ROOT / path) for path in ("protos", "client"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROGRAM.format(before=before), *arguments),
        env={**os.environ, "PYTHONPATH": paths, "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)
