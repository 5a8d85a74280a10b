"""A deployment for a test: real processes under the supervisor, on free ports, stopped and checked at the end."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import bare_environment, worker_threads
from prometheus_page import read_samples
from quire_client.admin import AdminClient

RUN = (sys.executable, "-m", "svc_common.supervisor")
SERVE = (sys.executable, "-m", "quire_client", "serve")
START_SECONDS = 240  # the first start of all also prepares the model


@dataclass(frozen=True)
class Deployment:
    """Addresses, metrics and log of a running deployment."""

    state_file: Path
    log: Path
    start: "Callable[[], subprocess.Popen[bytes]]"
    """Starts a supervisor with the deployment's settings and data."""
    supervisors: "list[subprocess.Popen[bytes]]"
    """Those that were started; only the last one may run."""

    @property
    def supervisor(self) -> "subprocess.Popen[bytes]":
        """The one that runs."""
        return self.supervisors[-1]

    @property
    def state(self) -> dict[str, Any]:
        """Process ids and addresses, as the supervisor writes them."""
        state: dict[str, Any] = json.loads(self.state_file.read_text())
        return state

    @property
    def http(self) -> str:
        """Base URL of the first gateway."""
        return f"http://{self.state['http'][0]}"

    @property
    def grpc(self) -> str:
        """host:port of the first gateway."""
        return str(self.state["grpc"][0])

    def metrics(self, role: str = "scheduler_metrics") -> dict[str, float]:
        """All samples of a role, by name and labels, summed over models."""
        address = self.state[role] if isinstance(self.state[role], str) else self.state[role][0]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as response:
            return read_samples(response.read().decode())

    def blocks(self) -> dict[str, int]:
        """Device blocks by state."""
        pattern = re.compile(r'quire_kv_blocks\{state="(\w+)",tier="device"\}')
        return {match[1]: int(value) for name, value in self.metrics().items() if (match := pattern.match(name))}

    @property
    def secret_file(self) -> Path:
        """The file with the deployment's secret."""
        return Path(self.state["deployment_secret_file"])

    def admin(self) -> AdminClient:
        """A client of the first scheduler's admin service."""
        return AdminClient(self.state["scheduler_admin"][0], secret_file=self.secret_file)

    def kill(self, role: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a role's process."""
        os.kill(self.state["roles"][role]["pid"], number)

    async def kill_supervisor(self) -> None:
        """Kill the supervisor, with which all roles end, and start another one; its addresses differ."""
        self.supervisor.kill()
        self.supervisor.wait()
        self.state_file.unlink()
        self.supervisors.append(self.start())
        await asyncio.to_thread(_wait_ready, self)

    async def rest(self) -> dict[str, int]:
        """Wait until no sequence runs or waits and no block is used; the blocks by state."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            metrics, blocks = self.metrics(), self.blocks()
            busy = metrics["quire_sequences_running"] + metrics["quire_sequences_waiting"]
            if not busy and not blocks["used"] and not blocks["copying"]:
                return blocks
            await asyncio.sleep(0.05)
        raise AssertionError(f"not at rest: {blocks}\n{self.log.read_text()[-4000:]}")


@contextmanager
def deployment(flags: Sequence[str] = (), /, **settings: str | int) -> Iterator[Deployment]:
    """Starts all roles with QUIRE_… settings (`max_step_tokens=32`), yields when they are ready, and stops them.

    With `flags`, `quire serve` starts them, with these arguments.
    Raises AssertionError if the deployment does not become ready, or does not end cleanly.
    """
    with tempfile.TemporaryDirectory(prefix="quire-test-") as directory:
        root = Path(directory)
        environment = bare_environment("QUIRE_CACHE_DIR")
        ports = ("http", "grpc", "scheduler", "scheduler_admin", "scheduler_metrics", "worker", "worker_metrics")
        environment |= {f"QUIRE_{port.upper()}_PORT": "0" for port in ports}
        environment |= {"QUIRE_RUN_DIR": str(root / "run"), "QUIRE_STATE_FILE": str(root / "state.json")}
        environment["QUIRE_CPU_KV_BYTES"] = str(2**29)  # each worker allocates it, and there may be several
        environment |= worker_threads() | {
            name if name.startswith("OTEL_") else f"QUIRE_{name.upper()}": str(value)
            for name, value in settings.items()
        }
        log = root / "log"

        def start() -> "subprocess.Popen[bytes]":
            with log.open("ab") as output:
                command = [*(SERVE if flags else RUN), *flags]
                return subprocess.Popen(command, env=environment, stdout=output, stderr=output)

        running = Deployment(root / "state.json", log, start, [start()])
        try:
            _wait_ready(running)
            yield running
        finally:
            running.supervisor.send_signal(signal.SIGTERM)
            try:
                code = running.supervisor.wait(60)
            except subprocess.TimeoutExpired:
                running.supervisor.kill()
                raise AssertionError(f"does not end:\n{log.read_text()[-4000:]}") from None
        assert code == 0, log.read_text()[-4000:]


def _wait_ready(running: Deployment) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if running.supervisor.poll() is not None:
            raise AssertionError(f"ended before it was ready:\n{running.log.read_text()[-4000:]}")
        # What it says with the example call comes after the state.
        num_ready = running.log.read_text().count("quire is ready")
        if running.state_file.exists() and running.state["ready"] and num_ready == len(running.supervisors):
            return
        time.sleep(0.05)
    raise AssertionError(f"not ready:\n{running.log.read_text()[-4000:]}")
