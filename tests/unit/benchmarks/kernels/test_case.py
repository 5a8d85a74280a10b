"""Measurements of cases: rates, errors, and compared results."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.kernels import case as cases
from benchmarks.kernels.case import KernelCase, best_peer
from benchmarks.kernels.device import Bound, DeviceRates

CPU = torch.device("cpu")
RATES = DeviceRates(memory=10.0, matrix=2.0, link=None)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes the number of milliseconds that is the first number of its result."""

    def milliseconds(run: Callable[[], object], device: torch.device) -> float:
        result = run()
        assert isinstance(result, torch.Tensor)
        return float(result.flatten()[0])

    monkeypatch.setattr(cases, "milliseconds", milliseconds)


def fails() -> object:
    raise RuntimeError("no such kernel\nand more")


def test_rates_are_of_the_device() -> None:
    case = KernelCase("op", "shape", Bound.MEMORY, 8e6, lambda: torch.tensor([2.0]))
    result = case.measure(CPU, RATES)
    assert (result["ms"], result["rate"], result["of_device"]) == (2.0, 4.0, 0.4)
    matrix = KernelCase("op", "shape", Bound.MATRIX, 2e9, lambda: torch.tensor([2.0])).measure(CPU, RATES)
    assert (matrix["rate"], matrix["of_device"]) == (1.0, 0.5)


def test_peers_are_compared_by_value() -> None:
    peers = {"same": lambda: torch.tensor([3.0, 4.0]), "shape": lambda: torch.tensor([1.0])}
    result = KernelCase("op", "", Bound.MEMORY, 1, lambda: torch.tensor([6.0, 8.0]), peers).measure(CPU, RATES)
    assert result["peers"]["same"]["relative_error"] == pytest.approx(1.0)
    assert result["peers"]["shape"]["relative_error"] is None


def test_torch_keeps_its_threads_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def count() -> object:
        return torch.tensor([float(threads[-1])])

    case = KernelCase("op", "", Bound.MEMORY, 1, count, {"peer": count}, leaves_torch_one_thread=True)
    result = case.measure(CPU, RATES)
    assert (result["ms"], result["peers"]["peer"]["ms"]) == (1.0, 3.0)


def test_an_op_that_cannot_run_has_an_error() -> None:
    result = KernelCase("op", "", Bound.MEMORY, 1, lambda: torch.tensor([1.0]), {"peer": fails}).measure(CPU, RATES)
    assert result["peers"]["peer"] == {"error": "RuntimeError: no such kernel"}
    broken = KernelCase("op", "", Bound.MEMORY, 1, fails, {"peer": lambda: torch.tensor([1.0])}).measure(CPU, RATES)
    assert broken["error"] == "RuntimeError: no such kernel"
    assert broken["peers"]["peer"] == {"ms": 1.0, "relative_error": None}


def test_the_best_peer_does_not_gather() -> None:
    peers = {"slow": {"ms": 3.0}, "with gather": {"ms": 1.0}, "broken": {"error": "no"}, "fast": {"ms": 2.0}}
    assert best_peer({"peers": peers}) == ("fast", 2.0)
    assert best_peer({"peers": {"broken": {"error": "no"}}}) is None
