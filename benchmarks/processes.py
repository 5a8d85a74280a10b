"""Servers under measurement: started in processes of their own, and ended with all that they started."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from benchmarks.record import ROOT
from svc_common.supervisor.launch import launch_command

STOP_SECONDS = 60

T = TypeVar("T")


class BenchmarkFailed(Exception):  # noqa: N818
    """A benchmark has no figures, for the reason in the text."""


@dataclass(frozen=True)
class Process:
    """A running program, and the file with its output."""

    name: str
    popen: "subprocess.Popen[bytes]"
    log: Path

    def wait_until(self, probe: Callable[[], T | None], seconds: float) -> T:
        """The first result of `probe` but None. Raises BenchmarkFailed at the program's end, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.popen.poll() is None and time.monotonic() < deadline:
            found = probe()
            if found is not None:
                return found
            time.sleep(0.1)
        status = self.popen.poll()
        why = f"was not ready in {seconds:.0f} s" if status is None else f"ended with status {status}"
        raise BenchmarkFailed(f"{self.name} {why}:\n{self.last_lines()}")

    def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL to what is left after STOP_SECONDS."""
        self.popen.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def last_lines(self) -> str:
        """The last 20 lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


@contextmanager
def running(
    name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, directory: Path = ROOT
) -> Iterator[Process]:
    """A program in a directory, with `environment` added to ours, which ends with the block or with us."""
    with TemporaryDirectory(prefix="quire-bench-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            popen = subprocess.Popen(
                launch_command(command),
                cwd=directory,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C ends the measuring first, and that ends this
            )
        process = Process(name, popen, log)
        try:
            yield process
        finally:
            process.stop()
