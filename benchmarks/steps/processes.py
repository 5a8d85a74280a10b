"""A scheduler with a Redis, and a worker whose model sleeps, as processes of their own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import running
from svc_common.supervisor.addresses import free_port


@dataclass(frozen=True)
class ProcessEndpoints:
    """Where scheduler and worker listen, and the files that they write when they end."""

    scheduler_port: int
    worker_port: int
    scheduler_times: Path
    worker_times: Path

    @classmethod
    def choose(cls, folder: Path) -> "ProcessEndpoints":
        """Free ports, and files in a folder."""
        return cls(free_port(), free_port(), folder / "scheduler.json", folder / "worker.json")

    @property
    def scheduler(self) -> str:
        """host:port of the scheduler."""
        return f"127.0.0.1:{self.scheduler_port}"


@contextmanager
def running_scheduler(endpoints: ProcessEndpoints, redis_url: str, *, without_journal: bool = False) -> Iterator[None]:
    """A scheduler that records in a Redis that runs."""
    environment = {
        "QUIRE_SCHEDULER_PORT": str(endpoints.scheduler_port),
        "QUIRE_INSECURE": "1",  # this benchmark's gateway and worker prove no role
        "QUIRE_SCHEDULER_ADMIN_PORT": "0",
        "QUIRE_SCHEDULER_METRICS_PORT": "0",
        "QUIRE_WORKERS_AT": f"127.0.0.1:{endpoints.worker_port}",
        "QUIRE_REDIS_URL": redis_url,
        "QUIRE_LOG_LEVEL": "warning",
    }
    command = (sys.executable, "-m", "benchmarks.steps.scheduler", "--times", str(endpoints.scheduler_times))
    with running("scheduler", (*command, *(["--without-journal"] if without_journal else [])), environment):
        yield


@contextmanager
def running_worker(endpoints: ProcessEndpoints, num_sequences: int, forward_seconds: float) -> Iterator[None]:
    """A worker with room for as many sequences, whose forward pass takes so long."""
    command = (
        *(sys.executable, "-m", "benchmarks.steps.worker", "--port", str(endpoints.worker_port)),
        *("--sequences", str(num_sequences), "--forward", str(forward_seconds), "--times", str(endpoints.worker_times)),
    )
    with running("worker", command):
        yield
