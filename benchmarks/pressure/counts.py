"""Quire with settings of the measurement's own, on free ports, and what it counts."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import BenchmarkFailed, running
from quire.worker.v1 import worker_pb2 as pb
from quire.worker.v1.worker_pb2_grpc import WorkerServiceStub

START_SECONDS = 600
_CALL_SECONDS = 30
_PORTS = ("HTTP", "GRPC", "SCHEDULER", "SCHEDULER_ADMIN", "SCHEDULER_METRICS", "WORKER", "WORKER_METRICS")

Samples = dict[tuple[str, str], float]
"""By name and the value of the one label that matters, or ""."""


@dataclass(frozen=True)
class Deployment:
    """One that is ready. Addresses are host:port."""

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
    """Quire as `make run` starts it, in bfloat16, with QUIRE_… settings and a Redis of its own. Stopped at the end.

    Raises BenchmarkFailed.
    """
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
                ready["grpc"][0], ready["workers"][0], ready["scheduler_metrics"], ready["worker_metrics"][0]
            )


@dataclass(frozen=True)
class Counts:
    """What scheduler and worker have counted. Seconds are those in which blocks were moved, backups among them."""

    swaps: int
    recomputes: int
    computed_tokens: int
    blocks_out: int
    blocks_in: int
    seconds_out: float
    seconds_in: float

    @classmethod
    def read(cls, deployment: Deployment) -> Self:
        """Since the start."""
        scheduler = scrape(deployment.scheduler_metrics, "choice")
        worker = scrape(deployment.worker_metrics, "direction")
        try:
            return cls(
                swaps=int(scheduler["quire_preemptions_total", "swap"]),
                recomputes=int(scheduler["quire_preemptions_total", "recompute"]),
                computed_tokens=int(scheduler["quire_tokens_computed_total", ""]),
                # A direction that nothing was moved in has no samples.
                blocks_out=int(worker.get(("quire_worker_swapped_blocks_total", "out"), 0)),
                blocks_in=int(worker.get(("quire_worker_swapped_blocks_total", "in"), 0)),
                seconds_out=worker.get(("quire_worker_swap_seconds_total", "out"), 0.0),
                seconds_in=worker.get(("quire_worker_swap_seconds_total", "in"), 0.0),
            )
        except KeyError as error:
            raise BenchmarkFailed(f"the scheduler does not export {error}") from error

    def since(self, before: "Counts") -> "Counts":
        """What was counted between two looks."""
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True)
class Believed:
    """What the scheduler takes a block to cost, in seconds: copied out and back in, or its tokens computed again."""

    swap_seconds: float
    recompute_seconds: float

    @classmethod
    def read(cls, deployment: Deployment) -> Self:
        """As it is now. Raises BenchmarkFailed where it does not tell."""
        scheduler = scrape(deployment.scheduler_metrics, "what")
        try:
            return cls(*(scheduler["quire_cost_seconds", what] for what in ("swap", "recompute")))
        except KeyError as error:
            raise BenchmarkFailed(f"the scheduler does not export {error}") from error


def scrape(address: str, label: str) -> Samples:
    """The samples of a Prometheus page."""
    text = httpx.get(f"http://{address}/metrics", trust_env=False, timeout=_CALL_SECONDS).raise_for_status().text
    families = text_string_to_metric_families(text)
    return {(s.name, s.labels.get(label, "")): s.value for family in families for s in family.samples}
