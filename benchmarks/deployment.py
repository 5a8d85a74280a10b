"""Quire as `make run` starts it, on free ports and with a Redis of its own, and its services' metrics."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import BenchmarkFailed, running
from benchmarks.record import ROOT
from quire.worker.v1 import worker_pb2 as pb
from quire.worker.v1.worker_pb2_grpc import WorkerServiceStub
from svc_common.identity import TokenIdentity, read_secret
from svc_common.models import ServedModel, resolve_model
from svc_common.service_roles import ServiceRole

SUPERVISOR = (sys.executable, "-m", "svc_common.supervisor")
START_SECONDS = 600
_CALL_SECONDS = 30
_PORTS = ("HTTP", "GRPC", "SCHEDULER", "SCHEDULER_ADMIN", "SCHEDULER_METRICS", "WORKER", "WORKER_METRICS")


@dataclass(frozen=True)
class Deployment:
    """A ready deployment. Addresses are host:port; `http` and `gateway` are the two protocols of one gateway.

    `gateway_metrics` is None where the gateway has no port for metrics. `secret_file` has the secret by which its
    services prove their roles; None: they do not.
    """

    http: str
    gateway: str
    worker: str
    scheduler_metrics: str
    worker_metrics: str
    gateway_metrics: str | None
    secret_file: Path | None

    def describe(self) -> pb.DescribeResponse:
        """The worker's description, as its scheduler gets it."""
        metadata: tuple[tuple[str, str], ...] = ()
        if self.secret_file is not None:
            scheduler = TokenIdentity(ServiceRole.SCHEDULER, read_secret(self.secret_file))
            metadata = scheduler.outbound(ServiceRole.WORKER).metadata
        with grpc.insecure_channel(self.worker) as channel:
            answer: pb.DescribeResponse = WorkerServiceStub(channel).Describe(
                pb.DescribeRequest(), timeout=_CALL_SECONDS, metadata=metadata
            )
            return answer


def prepare_model() -> ServedModel:
    """The model that QUIRE_MODEL names, or the default one, prepared first. Raises BenchmarkFailed, ModelNotFound."""
    command = [sys.executable, "-m", "worker_svc.prepare"]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        raise BenchmarkFailed("the model could not be prepared")
    return resolve_model(os.environ.get("QUIRE_MODEL"))


@contextmanager
def running_quire(
    title: str, settings: Mapping[str, str], tree: Path = ROOT, supervisor: Sequence[str] = SUPERVISOR
) -> Iterator[Deployment]:
    """Quire of a source tree in bfloat16, with `settings` beside. Stopped at the end. Raises BenchmarkFailed.

    `supervisor` is the command that starts it.
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
        with running(title, supervisor, environment, tree) as process:

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
                next(iter(ready.get("gateway_metrics", ())), None),
                Path(secret_file) if (secret_file := ready.get("deployment_secret_file")) else None,
            )


class Samples(dict[tuple[str, str], float]):
    """By name and the value of the one label that matters, or "". Raises BenchmarkFailed for one that is not there."""

    def __missing__(self, key: tuple[str, str]) -> float:
        raise BenchmarkFailed(f"the service does not export {key[0]} {key[1]}".rstrip())


def scrape(address: str, label: str = "") -> Samples:
    """The samples of a service's Prometheus page."""
    text = httpx.get(f"http://{address}/metrics", trust_env=False, timeout=_CALL_SECONDS).raise_for_status().text
    families = text_string_to_metric_families(text)
    return Samples({(s.name, s.labels.get(label, "")): s.value for family in families for s in family.samples})
