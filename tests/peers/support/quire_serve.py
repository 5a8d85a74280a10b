"""Starts Quire in place of the server that a suite's tests start. Copied beside the tests of each suite."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

START_SECONDS = 300
_PORTS = ("HTTP", "GRPC", "SCHEDULER", "SCHEDULER_ADMIN", "SCHEDULER_METRICS", "WORKER", "WORKER_METRICS")
_BAD_SETTINGS = 2


class QuireServe:
    """A `quire serve` with these flags, by default on free ports, which is ready. Where it refuses a flag, the test is
    skipped with its words. Raises RuntimeError if it does not start."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-peer-")))
        state, log = folder / "state.json", folder / "log"
        settings = {f"QUIRE_{name}_PORT": "0" for name in _PORTS}
        settings |= {"QUIRE_RUN_DIR": str(folder / "run"), "QUIRE_STATE_FILE": str(state)}
        settings["PYTHONPATH"] = os.environ["QUIRE_PATHS"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "OTEL_", "PYTHON"))}
        command = [os.environ["QUIRE_PYTHON"], "-m", "quire_client", "serve", *arguments]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, env=kept | settings, stdout=output, stderr=output)
        self._stack.callback(self._terminate)
        end = time.monotonic() + START_SECONDS
        while not (state.exists() and json.loads(state.read_text())["ready"]):
            if self.process.poll() is not None or time.monotonic() > end:
                self._fail(log.read_text()[-2000:])
            time.sleep(0.05)
        self.host, _, port = json.loads(state.read_text())["http"][0].rpartition(":")
        self.port = int(port)

    def stop(self) -> None:
        """Ends the processes."""
        self._stack.close()

    def _fail(self, log: str) -> None:
        self.stop()
        if self.process.returncode == _BAD_SETTINGS:
            pytest.skip(f"refused: {log.strip().splitlines()[-1]}")
        raise RuntimeError(f"the server did not start:\n{log}")

    def _terminate(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
