"""The systems that are compared: each started anew, in bfloat16, as an HTTP server of OpenAI's API."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import httpx

from benchmarks.deployment import START_SECONDS, running_quire
from benchmarks.processes import BenchmarkFailed, running
from benchmarks.runner import log
from benchmarks.vllm import vllm_dtype, vllm_environment, vllm_title
from svc_common.models import ServedModel
from svc_common.supervisor.addresses import free_port

CONTEXT_LENGTH = 2048
SMALL_STEP_TOKENS = 256
"""What a step of Quire computes on a processor while few sequences decode.

vLLM is measured with it too: its own default makes gaps between tokens longer.
"""

# The package's name depends on the device.
_VLLM_VERSION = """
from importlib.metadata import packages_distributions, version
names = packages_distributions()["vllm"]
print(names[0], version(names[0]))
"""


@dataclass(frozen=True)
class Endpoint:
    """A server that is ready. `metrics` is where the scheduler's Prometheus page is, host:port, of Quire alone.

    `closes_connections`: after each response, without saying so.
    """

    url: str
    metrics: str | None = None
    closes_connections: bool = False


class System(Protocol):
    """A server of the model over HTTP. `name` stands in results and flags, `title` in tables."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    def running(self) -> AbstractContextManager[Endpoint]:
        """Starts it, yields it once it is ready, and stops it. Raises BenchmarkFailed."""


@dataclass(frozen=True)
class Quire:
    """Quire as `make run` starts it, with these settings beside, on free ports and with a Redis of its own."""

    name: str = "quire"
    title: str = "Quire"
    settings: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        with running_quire(self.title, self.settings) as deployment:
            yield Endpoint(f"http://{deployment.http}", deployment.scheduler_metrics)


@dataclass(frozen=True)
class Vllm:
    """vLLM's CPU build, in a virtual environment of its own. `step_tokens` is its budget for a step; None: its own."""

    model: ServedModel
    environment: Path
    name: str = "vllm"
    title: str = vllm_title("vLLM")
    step_tokens: int | None = None

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        port = free_port()
        command = (
            *(str(self.environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model.path), "--served-model-name", self.model.name, "--dtype", vllm_dtype()),
            *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT_LENGTH)),
            *(() if self.step_tokens is None else ("--max-num-batched-tokens", str(self.step_tokens))),
        )
        with running(self.title, command, vllm_environment()) as process:
            yield process.wait_until(lambda: listening(port), START_SECONDS)

    def version(self) -> str:
        """The version of vLLM's package. Raises BenchmarkFailed where the environment has none."""
        done = subprocess.run(
            [self.environment / "bin" / "python", "-c", _VLLM_VERSION], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise BenchmarkFailed(f"{self.environment} has no vLLM: {done.stderr.strip()}")
        return done.stdout.strip()


@dataclass(frozen=True)
class ContinuousBatching:
    """transformers' continuous batching behind a minimal streaming server: `transformers serve` supports neither
    token ids nor exact output lengths."""

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
            yield process.wait_until(lambda: listening(port), START_SECONDS)


def make_systems(model: ServedModel, wanted: Sequence[str] | None) -> list[System]:
    """The systems of these names; None: all that are installed but continuous batching, whose run takes ten minutes.

    vLLM is that of the environment in VLLM_VENV. Raises BenchmarkFailed where a named system is missing.
    """
    environment = os.environ.get("VLLM_VENV")
    installed: list[System] = [Quire()]
    if environment:
        vllm = Vllm(model, Path(environment))
        vllm.version()
        title = f"{vllm.title}, steps of {SMALL_STEP_TOKENS} tokens"
        installed += [vllm, replace(vllm, name="vllm_small_steps", title=title, step_tokens=SMALL_STEP_TOKENS)]
    elif wanted is None:
        log("vLLM is left out: VLLM_VENV names no environment that has it")
    installed.append(ContinuousBatching(model))
    if wanted is None:
        return [system for system in installed if not isinstance(system, ContinuousBatching)]
    known = {system.name: system for system in installed}
    if missing := [name for name in wanted if name not in known]:
        raise BenchmarkFailed(f"not installed: {', '.join(missing)}; installed: {', '.join(known)}")
    return [known[name] for name in wanted]


def listening(port: int) -> Endpoint | None:
    """The server of OpenAI's API on this port; None while it does not answer."""
    url = f"http://127.0.0.1:{port}"
    try:
        answer = httpx.get(f"{url}/v1/models", trust_env=False)
    except httpx.HTTPError:
        return None
    return Endpoint(url) if answer.is_success else None
