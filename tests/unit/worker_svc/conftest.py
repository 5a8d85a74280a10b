"""Random models on disk, transformers' references, and a worker that serves a model."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from safetensors.torch import load_file, save_file

import llama_models
from worker_service import Worker, serving, small_replica
from worker_svc.instance import ModelInstance


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads slow down models as small as these, especially on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a random model of a config and writes it to a new directory."""

    def save(config: Any, **options: Any) -> Path:
        return llama_models.save_model(tmp_path_factory.mktemp("model"), config, **options)

    return save


@pytest.fixture(scope="session")
def tiny_llama(save_model: Callable[..., Path]) -> Path:
    return save_model(llama_models.VARIANTS["llama"]())


@pytest.fixture(scope="session")
def reference() -> Callable[[Path, list[list[int]], int], list[list[int]]]:
    """Greedy continuations by transformers' generate, one prompt at a time."""
    return llama_models.generate


@pytest.fixture(scope="module")
def replica(tiny_llama: Path) -> ModelInstance:
    return small_replica(tiny_llama)


@pytest.fixture
async def loading_worker() -> AsyncIterator[Worker]:
    """A worker without a replica."""
    async with serving() as worker:
        yield worker


@pytest.fixture
def worker(loading_worker: Worker, replica: ModelInstance) -> Worker:
    """A ready worker."""
    loading_worker.service.serve(replica)
    return loading_worker


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Has the spans of sequences that have ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("worker_svc.spans.tracer", lambda: provider.get_tracer("test"))
    return exporter


@pytest.fixture
def faulty(save_model: Callable[..., Path]) -> Path:
    """A model whose logits are NaN from token 13 on."""
    directory = save_model(llama_models.VARIANTS["llama"]())
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][13] = float("nan")
    save_file(tensors, directory / "model.safetensors")
    return directory
