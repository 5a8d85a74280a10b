"""The number of host blocks, and settings that exceed the memory."""

import pytest
import torch

from fake_gpu import FakeGpu
from worker_svc import memory
from worker_svc.memory import MemoryBudget, OutOfMemory, check_num_blocks, count_blocks, count_host_blocks

GIB = 2**30
MIB = 2**20
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 GiB available."""
    monkeypatch.setattr(memory, "available_memory", lambda _=None: 8 * GIB)


@pytest.mark.parametrize(
    ("num_blocks", "device", "expected"),
    [
        (100, CPU, 100),  # as many as the device has
        (4096, CPU, 1024),  # a quarter of what the others leave
        (4096, GPU, 2048),  # which take no memory of the host's on a GPU
        (9000, CPU, 0),
    ],
)
def test_by_default_there_are_as_many_as_leave_room_for_others(
    num_blocks: int, device: torch.device, expected: int
) -> None:
    assert count_host_blocks(MIB, num_blocks, None, device) == expected


def test_by_default_they_take_16_gib_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda _=None: 1000 * GIB)
    assert count_host_blocks(MIB, 100_000, None, GPU) == 16 * 1024


@pytest.mark.parametrize(("swap_space", "expected"), [(0.0, 0), (0.5, 512), (7.0, 7168)])
def test_the_setting_is_in_gib(swap_space: float, expected: int) -> None:
    assert count_host_blocks(MIB, 10, swap_space, CPU) == expected


@pytest.mark.parametrize("swap_space", [8.0, 1e12, 1e-9])
def test_more_than_there_is_or_less_than_a_block_is_refused_by_the_settings_name(swap_space: float) -> None:
    with pytest.raises(OutOfMemory, match="QUIRE_SWAP_SPACE"):
        count_host_blocks(MIB, 10, swap_space, CPU)


def test_more_blocks_than_fit_are_refused_by_the_settings_name() -> None:
    check_num_blocks(8 * 1024, MIB, CPU)
    with pytest.raises(OutOfMemory, match="QUIRE_NUM_BLOCKS"):
        check_num_blocks(8 * 1024 + 1, MIB, CPU)


def test_blocks_of_a_gpu_leave_room_for_captured_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For their tensors, which torch keeps for them, and for the graphs themselves, which only the driver counts."""
    gpu = FakeGpu(monkeypatch)
    gpu.allocated, gpu.kept, gpu.elsewhere = 300 * MIB, 50 * MIB, 20 * MIB

    class Runner:
        def __init__(self) -> None:
            gpu.graphs, gpu.elsewhere = 60 * MIB, gpu.elsewhere + 15 * MIB
            gpu.run(100 * MIB)

        def __del__(self) -> None:
            gpu.graphs, gpu.elsewhere = 0, gpu.elsewhere - 15 * MIB

    budget = MemoryBudget(fraction=0.9, cpu_bytes=0)
    assert count_blocks(MIB, budget, GPU, Runner) == 900 - 300 - 60 - 100 - 20 - 15
    assert (gpu.kept, gpu.graphs, gpu.elsewhere) == (0, 0, 20 * MIB)


def test_a_gpu_without_room_has_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    gpu.allocated = 890 * MIB
    assert count_blocks(MIB, MemoryBudget(fraction=0.9, cpu_bytes=0), GPU, lambda: gpu.run(11 * MIB)) == 0


@pytest.mark.parametrize(
    ("cpu_bytes", "usual", "left", "expected", "is_run"),
    [
        (GIB, True, 8 * GIB, 1024, False),
        (GIB, False, 8 * GIB, 1024, True),
        (2 * GIB, True, 8 * GIB, 2048, True),
        (2 * GIB, True, 4 * GIB, 1638, True),  # 0.4 of what the step leaves
    ],
)
def test_on_a_cpu_the_largest_step_runs_where_memory_may_be_short(
    cpu_bytes: int, usual: bool, left: int, expected: int, is_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def profile() -> None:
        runs.append(True)
        monkeypatch.setattr(memory, "available_memory", lambda _=None: left)

    assert count_blocks(MIB, MemoryBudget(None, cpu_bytes, has_usual_steps=usual), CPU, profile) == expected
    assert runs == [True] * is_run
