"""What a worker's memory is divided into."""

import mmap
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import pytest
import torch

from fake_gpu import FakeGpu
from worker_svc.memory_parts import MemoryAccount, MemoryParts

MIB = 1 << 20
Result = TypeVar("Result")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def mapped(num_bytes: int) -> torch.Tensor:
    """Memory of its own, no page of which is in use yet."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def in_a_process_of_its_own(measure: Callable[[], Result]) -> Result:
    """A process's memory is measured, and nothing else may take or return some meanwhile."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure).result(timeout=120)


def measure_parts() -> tuple[MemoryParts, MemoryParts, MemoryParts]:
    """Without use of the blocks, with 16 and 8 MiB of them and 48 MiB of activations, and without the blocks."""
    account = MemoryAccount(CPU)
    weights = torch.ones(64 * MIB, dtype=torch.uint8)
    account.note_weights()
    blocks, host_blocks = mapped(64 * MIB), mapped(32 * MIB)
    account.note_blocks(blocks, host_blocks)
    before = account.read()
    blocks[: 16 * MIB] = 1
    host_blocks[: 8 * MIB] = 1
    activations = torch.ones(48 * MIB, dtype=torch.uint8)
    after = account.read()
    account.close()
    assert weights[0] == activations[0]
    return before, after, account.read()


def test_parts_of_a_processors_memory_are_what_is_in_use() -> None:
    before, after, closed = in_a_process_of_its_own(measure_parts)
    assert before.weights == pytest.approx(64 * MIB, abs=16 * MIB)
    assert (before.kv, before.swap) == (0, 0)
    assert (after.kv, after.swap) == (16 * MIB, 8 * MIB)
    assert after.activations - before.activations == pytest.approx(48 * MIB, abs=16 * MIB)
    assert after.weights == before.weights
    assert (closed.kv, closed.swap) == (0, 0)


def measure_beside_an_unused_heap() -> tuple[MemoryParts, MemoryParts]:
    """Without and with 48 MiB of activations, where the heap has kept 120 MiB since before the model came."""
    pieces = [bytes(64 << 10) for _ in range(2048)]  # of a size that gets no mapping of its own
    kept = pieces[::16]
    del pieces
    account = MemoryAccount(CPU)
    account.note_weights()
    before = account.read()
    activations = torch.ones(48 * MIB, dtype=torch.uint8)
    after = account.read()
    assert len(kept) == 128
    assert activations[0]
    return before, after


def test_what_the_heap_kept_before_the_model_came_does_not_hide_its_activations() -> None:
    before, after = in_a_process_of_its_own(measure_beside_an_unused_heap)
    assert before.fragmentation > 64 * MIB
    assert after.activations - before.activations == pytest.approx(48 * MIB, abs=16 * MIB)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def test_parts_of_a_gpus_memory_are_what_torch_has_allocated(gpu: FakeGpu) -> None:
    gpu.allocated = 10 * MIB  # by another model of the process
    account = MemoryAccount(GPU)
    gpu.allocated += 300 * MIB
    account.note_weights()
    account.note_blocks(mapped(200 * MIB), mapped(50 * MIB))
    gpu.allocated += 200 * MIB + 40 * MIB
    gpu.kept = 30 * MIB
    parts = account.read()
    assert parts == MemoryParts(
        weights=300 * MIB,
        kv=200 * MIB,
        swap=50 * MIB,
        activations=40 * MIB,
        fragmentation=30 * MIB,
        device_used=580 * MIB,
        device_limit=1000 * MIB,
    )
    assert parts.describe()["device"] == {"used_bytes": 580 * MIB, "limit_bytes": 1000 * MIB}


def test_what_graphs_use_counts_as_activations(gpu: FakeGpu) -> None:
    account = MemoryAccount(GPU)
    gpu.allocated += 300 * MIB
    account.note_weights()
    with account.capture():
        gpu.kept = 25 * MIB
        gpu.graphs = 60 * MIB
    gpu.allocated += 40 * MIB
    gpu.kept = 10 * MIB
    parts = account.read()
    assert (parts.activations, parts.fragmentation) == (100 * MIB, 10 * MIB)


def test_what_another_models_graphs_use_is_not_this_ones(gpu: FakeGpu) -> None:
    gpu.graphs = 60 * MIB
    account = MemoryAccount(GPU)
    gpu.kept = 25 * MIB
    with account.capture():
        gpu.graphs += 20 * MIB
    assert account.read().activations == 20 * MIB


def test_without_graphs_nothing_unused_counts_as_theirs(gpu: FakeGpu) -> None:
    account = MemoryAccount(GPU)
    gpu.kept = 25 * MIB
    parts = account.read()
    assert (parts.activations, parts.fragmentation) == (0, 25 * MIB)


def test_a_processor_has_no_device_of_its_own() -> None:
    parts = MemoryParts(weights=1, kv=2, swap=3, activations=4, fragmentation=5)
    names = ("weights", "kv", "swap", "activations", "fragmentation")
    assert parts.describe() == {f"{name}_bytes": number for number, name in enumerate(names, 1)}
