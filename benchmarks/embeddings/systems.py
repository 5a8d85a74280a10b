"""The systems that are compared. Each is a closed loop: the next batch is sent when the last one is answered."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import httpx

from benchmarks.deployment import START_SECONDS, running_quire
from benchmarks.embeddings.environments import (
    DECODER,
    ENCODER,
    EmbeddingModel,
    model_directory,
    sentence_transformers_python,
)
from benchmarks.environments import python_with
from benchmarks.processes import BenchmarkFailed, running
from svc_common.supervisor.addresses import free_port

_TIMEOUT = 120  # seconds, of a batch

Batch = Sequence[str]


class RunningSystem(Protocol):
    """A system that is ready."""

    def seconds(self, batches: Sequence[Batch], concurrency: int) -> float:
        """How long these batches take, `concurrency` at a time."""


class EmbeddingSystem(Protocol):
    """`name` stands in results and flags, `title` in tables."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def is_server(self) -> bool:
        """Whether it computes several batches at a time."""

    def running(self) -> AbstractContextManager[RunningSystem]:
        """Starts it, yields it once it is ready, and stops it. Raises BenchmarkFailed."""


@dataclass(frozen=True)
class RunningServer:
    """A server of OpenAI's API of embeddings. Vectors are asked for in base64, as by OpenAI's client."""

    url: str
    body: dict[str, Any]

    def seconds(self, batches: Sequence[Batch], concurrency: int) -> float:
        return asyncio.run(self._send(batches, concurrency))

    async def _send(self, batches: Sequence[Batch], concurrency: int) -> float:
        remaining = iter(batches)

        async def send(client: httpx.AsyncClient) -> None:
            for batch in remaining:
                answer = await client.post(self.url, json=self.body | {"input": list(batch)})
                if len(answer.raise_for_status().json()["data"]) != len(batch):
                    raise BenchmarkFailed(f"{self.url} answered with fewer vectors than texts")

        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT) as client:
            started = time.perf_counter()
            await asyncio.gather(*(send(client) for _ in range(concurrency)))
            return time.perf_counter() - started


@dataclass(frozen=True)
class QuireServer:
    """Quire as `make run` starts it, by HTTP."""

    dtype: str
    quantization: str = "none"
    is_server: bool = True

    @property
    def _form(self) -> str:
        return self.dtype if self.quantization == "none" else self.quantization

    @property
    def name(self) -> str:
        return f"quire-{self._form}"

    @property
    def title(self) -> str:
        return f"Quire, {self._form}"

    @contextmanager
    def running(self) -> Iterator[RunningServer]:
        formats = {"QUIRE_DTYPE": self.dtype, "QUIRE_QUANTIZATION": self.quantization}
        settings = {"QUIRE_MODEL": str(model_directory()), **formats}
        with running_quire(self.title, settings) as deployment:
            yield RunningServer(
                f"http://{deployment.http}/v1/embeddings", {"model": "model", "encoding_format": "base64"}
            )


@dataclass(frozen=True)
class InfinityServer:
    """infinity-emb's server in float32, with torch."""

    name: str = "infinity"
    title: str = "infinity-emb, float32"
    is_server: bool = True

    @contextmanager
    def running(self) -> Iterator[RunningServer]:
        port = free_port()
        command = (
            *(str(python_with("infinity").with_name("infinity_emb")), "v2", "--model-id", str(model_directory())),
            *("--served-model-name", "model", "--engine", "torch", "--device", "cpu", "--dtype", "float32"),
            *("--no-bettertransformer", "--host", "127.0.0.1", "--port", str(port)),
        )
        environment = {"INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}

        def listening() -> bool | None:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/models", trust_env=False).is_success or None
            except httpx.HTTPError:
                return None

        with running(self.title, command, environment) as process:
            process.wait_until(listening, START_SECONDS)
            yield RunningServer(f"http://127.0.0.1:{port}/embeddings", {"model": "model", "encoding_format": "base64"})


@dataclass(frozen=True)
class RunningLibrary:
    """A library in a process of its own, which measures itself: the time has no exchange of messages."""

    title: str
    popen: "subprocess.Popen[str]"

    def encode(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """The seconds of each batch, and the vectors of the last one. Raises BenchmarkFailed."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"batches": [list(batch) for batch in batches]}) + "\n")
        self.popen.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """Its next line."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise BenchmarkFailed(f"{self.title} ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def seconds(self, batches: Sequence[Batch], concurrency: int) -> float:
        assert concurrency == 1
        return float(sum(self.encode(batches)["seconds"]))


@dataclass(frozen=True)
class Library:
    """A library, without a server. `python` finds the environment that has its package."""

    name: str
    title: str
    package: str
    python: Callable[[], Path]
    is_server: bool = False
    model: EmbeddingModel = ENCODER
    dtype: str = "float32"

    def in_dtype(self, dtype: str, model: EmbeddingModel) -> "Library":
        """The same one with another model, in a dtype that its name has."""
        title = self.title.replace(self.dtype, dtype)
        return replace(self, name=f"{self.name}-{dtype}", title=title, model=model, dtype=dtype)

    def command(self) -> tuple[Path | str, ...]:
        """The command of its process. Raises BenchmarkFailed."""
        return self.python(), Path(__file__).with_name("encode.py"), self.package, self.dtype, self.model.directory()

    @contextmanager
    def running(self) -> Iterator[RunningLibrary]:
        with subprocess.Popen(
            self.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as popen:
            process = RunningLibrary(self.title, popen)
            try:
                process.read()
                yield process
            finally:
                popen.terminate()


QUIRE_LIBRARY = Library("quire-library", "Quire, float32, in process", "quire", lambda: Path(sys.executable))
SENTENCE_TRANSFORMERS = Library(
    "sentence-transformers",
    "sentence-transformers, float32, in process",
    "sentence-transformers",
    sentence_transformers_python,
)

_LIBRARIES = (QUIRE_LIBRARY, SENTENCE_TRANSFORMERS)
SYSTEMS: tuple[EmbeddingSystem, ...] = (
    *_LIBRARIES,
    QuireServer("float32"),
    QuireServer("bfloat16"),
    QuireServer("bfloat16", "w8a8"),
    InfinityServer(),
)
SYSTEMS_WITH_DECODER: tuple[EmbeddingSystem, ...] = tuple(
    library.in_dtype(dtype, DECODER) for dtype in ("float32", "bfloat16") for library in _LIBRARIES
)
