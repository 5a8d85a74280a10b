"""Staged data arrives at fixed addresses, and a step's buffer is not reused while the step is in flight."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from worker_svc.cache import CacheShape
from worker_svc.gpu.staging import ALIGNMENT, Staging, pin


@pytest.fixture
def staging(device: torch.device) -> Staging:
    return Staging(256, 16, device)


def test_arrays_of_all_kinds_arrive_in_their_groups(staging: Staging) -> None:
    groups: list[list[NDArray[Any]]] = [
        [np.arange(5, dtype=np.int32), np.array([[1.5, 2.0], [3.0, -1.0]])],
        [],
        [np.empty(0, np.int64), np.array([2**62], np.int64), np.array([0.25], np.float32)],
    ]
    with staging.next_buffer() as buffer:
        sent = staging.send(buffer, groups)
    assert [len(group) for group in sent] == [2, 0, 3]
    for group, arrays in zip(sent, groups, strict=True):
        for tensor, array in zip(group, arrays, strict=True):
            assert tensor.data_ptr() % ALIGNMENT == 0 or not array.size
            np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)


def test_arrays_of_the_same_sizes_have_the_same_addresses(staging: Staging) -> None:
    with staging.next_buffer() as buffer:
        first = staging.send(buffer, [[np.arange(3), np.arange(2)]])
    with staging.next_buffer() as buffer:
        second = staging.send(buffer, [[np.arange(3, 6), np.arange(2, 4)], [np.arange(7)]])
    assert [t.data_ptr() for t in second[0]] == [t.data_ptr() for t in first[0]]
    assert first[0][1].tolist() == [2, 3]


def test_results_of_two_steps_are_there_at_the_same_time(staging: Staging, device: torch.device) -> None:
    fetched = []
    for step in range(2):
        tokens = torch.tensor([step, step + 10], device=device)
        with staging.next_buffer() as buffer:
            packed = staging.reserve(buffer, 20)
            fetched.append(staging.fetch(buffer, [tokens, torch.tensor([[0.5 + step]], device=device)], packed))
        buffer.done.synchronize()
    for step, memory in enumerate(fetched):
        assert memory[:16].view(torch.int64).tolist() == [step, step + 10]
        assert memory[16:].view(torch.float32).tolist() == [0.5 + step]


class Completion:
    """An event that counts who waits for it."""

    def __init__(self) -> None:
        self.waited = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Completion]:
    """The events at the ends of steps."""
    events: list[Completion] = []

    def record(device: torch.device) -> Completion:
        events.append(Completion())
        return events[-1]

    monkeypatch.setattr("worker_svc.gpu.staging.record", record)
    return events


def test_a_buffer_is_reused_only_when_its_step_is_done(staging: Staging, recorded: list[Completion]) -> None:
    buffers = []
    for step in range(3):
        with staging.next_buffer() as buffer:
            buffers.append(buffer)
            assert [event.waited for event in recorded] == [[], [0], [1, 0]][step]
    assert buffers[0] is buffers[2] is not buffers[1]


def test_a_step_that_fails_leaves_the_buffer_of_the_step_before_it(
    staging: Staging, recorded: list[Completion]
) -> None:
    with staging.next_buffer() as before:
        pass
    buffers = []
    for attempt in range(3):
        # One that fails may have enqueued a copy of its inputs before.
        with contextlib.suppress(ValueError), staging.next_buffer() as buffer:
            buffers.append(buffer)
            assert [event.waited for event in recorded] == [[0], [0, 1], [0, 1, 1]][attempt]
            if attempt < 2:
                raise ValueError
    assert before is not buffers[0] is buffers[1] is buffers[2]
    with staging.next_buffer() as after:
        assert after is before


class FakeRuntime:
    """The calls of CUDA's runtime that pin memory, without a GPU."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815  as torch has it

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address not in self.pinned
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert _is_mapped(address)
        del self.pinned[address]
        return 0


def _is_mapped(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


def test_memory_is_pinned_while_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system maps at its address later is other memory, which may be pinned in turn."""
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "_cudart", runtime)
    for _ in range(2):
        host_blocks = CacheShape.of_equal_layers(2, 2, 16, 64, torch.float16).allocate_host(64)
        view = host_blocks[3:5]
        pin(host_blocks)
        assert runtime.pinned == {host_blocks.data_ptr(): host_blocks.nbytes}
        del view, host_blocks
        assert not runtime.pinned


def test_an_upload_is_a_tensor_of_its_own(staging: Staging, device: torch.device) -> None:
    tensor = staging.upload(np.array([4, 5], np.int64))
    assert tensor.device.type == device.type
    assert tensor.tolist() == [4, 5]
