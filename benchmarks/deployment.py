"""Quire as `make run` starts it, on free ports and with a Redis of its own, and what its services count."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import BenchmarkFailed, running
from quire.worker.v1 import worker_pb2 as pb
from quire.worker.v1.worker_pb2_grpc import WorkerServiceStub

START_SECONDS = 600
_CALL_SECONDS = 30
_PORTS = ("HTTP", "GRPC", "SCHEDULER", "SCHEDULER_ADMIN", "SCHEDULER_METRICS", "WORKER", "WORKER_METRICS")


@dataclass(frozen=True)
class Deployment:
    """One that is ready. Addresses are host:port; `http` and `gateway` are the two protocols of one gateway."""

    http: str
    gateway: str
    worker: str
    scheduler_metrics: str
    worker_metrics: str

    def describe(self) -> pb.DescribeResponse:
        """What the worker says of itself."""
        with grpc.insecure_channel(self.worker) as channel:
            answer: pb.DescribeResponse = WorkerServiceStub(channel).Describe(
                pb.DescribeRequest(), timeout=_CALL_SECONDS
            )
            return answer


@contextmanager
def running_quire(title: str, settings: Mapping[str, str]) -> Iterator[Deployment]:
    """Quire in bfloat16, with QUIRE_… settings beside. Stopped at the end. Raises BenchmarkFailed."""
    with TemporaryDirectory(prefix="quire-bench-") as folder:
        state_file = Path(folder, "state.json")
        environment = {
            **{f"QUIRE_{port}_PORT": "0" for port in _PORTS},
            "QUIRE_DTYPE": "bfloat16",
            "QUIRE_RUN_DIR": folder,
            "QUIRE_STATE_FILE": str(state_file),
            **settings,
        }
        with running(title, (sys.executable, "-m", "svc_common.supervisor"), environment) as process:

            def state() -> dict[str, Any] | None:
                found: dict[str, Any] = json.loads(state_file.read_bytes()) if state_file.exists() else {}
                return found if found.get("ready") else None

            ready = process.wait_until(state, START_SECONDS)
            yield Deployment(
                ready["http"][0],
                ready["grpc"][0],
                ready["workers"][0],
                ready["scheduler_metrics"][0],
                ready["worker_metrics"][0],
            )


class Samples(dict[tuple[str, str], float]):
    """By name and the value of the one label that matters, or "". Raises BenchmarkFailed for one that is not there."""

    def __missing__(self, key: tuple[str, str]) -> float:
        raise BenchmarkFailed(f"the scheduler does not export {key[0]} {key[1]}".rstrip())


def scrape(address: str, label: str = "") -> Samples:
    """The samples of a service's Prometheus page."""
    text = httpx.get(f"http://{address}/metrics", trust_env=False, timeout=_CALL_SECONDS).raise_for_status().text
    families = text_string_to_metric_families(text)
    return Samples({(s.name, s.labels.get(label, "")): s.value for family in families for s in family.samples})
