"""One service as a process, started as an operator starts it, and the entries of its log."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_SECONDS = 240.0


@dataclass(frozen=True)
class ServiceProcess:
    """A running service, whose log is a file."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def logged(self, event: str) -> dict[str, Any]:
        """Waits for the first log entry that begins so."""
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            for line in self.log.read_text().splitlines():
                entry: dict[str, Any] = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
                if entry.get("event", "").startswith(event):
                    return entry
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            time.sleep(0.05)
        raise AssertionError(f"no {event}:\n{self.log.read_text()[-4000:]}")


@contextmanager
def service_process(name: str, environment: Mapping[str, str], directory: Path) -> Iterator[ServiceProcess]:
    """`python -m NAME` until the end of the block."""
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", name], env=environment, stdout=output, stderr=output)
    try:
        yield ServiceProcess(process, log)
    finally:
        process.kill()
        process.wait()
