"""The systems that are compared: each started afresh, in bfloat16, as an HTTP server of OpenAI's API."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from benchmarks.deployment import START_SECONDS, running_quire
from benchmarks.processes import BenchmarkFailed, running
from svc_common.models import ServedModel
from svc_common.supervisor.addresses import free_port

CONTEXT_LENGTH = 2048

# Its package has other names for other devices.
_VLLM_VERSION = """
from importlib.metadata import packages_distributions, version
names = packages_distributions()["vllm"]
print(names[0], version(names[0]))
"""


@dataclass(frozen=True)
class Endpoint:
    """A server that is ready. `metrics` is where the scheduler's Prometheus page is, host:port, of Quire alone."""

    url: str
    metrics: str | None = None


class System(Protocol):
    """Something that serves the model over HTTP."""

    @property
    def name(self) -> str:
        """What it is called in results and flags."""

    @property
    def title(self) -> str:
        """What it is called in tables."""

    def running(self) -> AbstractContextManager[Endpoint]:
        """Starts it, yields it when it is ready, and stops it. Raises BenchmarkFailed."""


@dataclass(frozen=True)
class Quire:
    """Quire as `make run` starts it, on free ports and with a Redis of its own."""

    name: str = "quire"
    title: str = "Quire"

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        with running_quire(self.title, {}) as deployment:
            yield Endpoint(f"http://{deployment.http}", deployment.scheduler_metrics)


@dataclass(frozen=True)
class Vllm:
    """vLLM's build for processors, of a virtual environment that has it."""

    model: ServedModel
    environment: Path
    name: str = "vllm"
    title: str = "vLLM, CPU build"

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        port = free_port()
        command = (
            *(str(self.environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model.path), "--served-model-name", self.model.name, "--dtype", "bfloat16"),
            *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT_LENGTH)),
        )
        with running(self.title, command, {"VLLM_CPU_KVCACHE_SPACE": "2"}) as process:
            yield process.wait_until(lambda: _listening(port), START_SECONDS)

    def version(self) -> str:
        """Of vLLM's package. Raises BenchmarkFailed where the environment has none."""
        done = subprocess.run(
            [self.environment / "bin" / "python", "-c", _VLLM_VERSION], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise BenchmarkFailed(f"{self.environment} has no vLLM: {done.stderr.strip()}")
        return done.stdout.strip()


@dataclass(frozen=True)
class ContinuousBatching:
    """transformers' continuous batching behind the smallest server that streams it: `transformers serve` itself
    takes neither token ids nor exact output lengths."""

    model: ServedModel
    name: str = "continuous_batching"
    title: str = "transformers, continuous batching"

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        port = free_port()
        command = (
            *(sys.executable, "-m", "benchmarks.serving.continuous_batching"),
            *("--model", str(self.model.path), "--name", self.model.name, "--port", str(port)),
        )
        with running(self.title, command) as process:
            yield process.wait_until(lambda: _listening(port), START_SECONDS)


def _listening(port: int) -> Endpoint | None:
    url = f"http://127.0.0.1:{port}"
    try:
        answer = httpx.get(f"{url}/v1/models", trust_env=False)
    except httpx.HTTPError:
        return None
    return Endpoint(url) if answer.is_success else None
