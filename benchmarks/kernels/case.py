"""One case: an op on given tensors, its bound and its peers, and their measurement."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from benchmarks.kernels.device import Bound, DeviceRates, milliseconds

Run = Callable[[], object]
BY_AMX = " by AMX"
"""Suffix of the shape of a case that AMX computes."""


class SpeedTarget(Enum):
    """The kind of a case's targets."""

    NOTHING = "nothing"
    DECODE = "decode"
    RAGGED_DECODE = "ragged decode"
    PREFILL = "prefill"
    WIDE_PRODUCT = "wide product"
    INTEGER_PRODUCT = "integer product"


@dataclass(frozen=True)
class KernelCase:
    """`amount` is the bytes that the op must move (MEMORY, LINK), or its operations (MATRIX).

    Each of `peers` does the same on the same values; where both return tensors, the results are compared. Those "with
    gather" include copying the pages into one piece. With `leaves_torch_one_thread`, the op is measured as workers run
    it that compute with the compiled kernels: torch's other threads, after each of its own ops, wait for the next one
    on a processor for milliseconds.
    """

    op: str
    shape: str
    bound: Bound
    amount: float
    ours: Run
    peers: Mapping[str, Run] = field(default_factory=dict)
    asked: SpeedTarget = SpeedTarget.NOTHING
    leaves_torch_one_thread: bool = False

    def measure(self, device: torch.device, rates: DeviceRates) -> dict[str, Any]:
        """Times of the op and its peers, or the error where one cannot run."""
        result: dict[str, Any] = {
            "op": self.op,
            "shape": self.shape,
            "bound": self.bound.unit,
            "asked": self.asked.value,
        }
        with torch.inference_mode():
            with _threads_of_torch(1 if self.leaves_torch_one_thread else torch.get_num_threads()):
                result |= self._time(self.ours, device)
            if "ms" in result:
                rate = self.amount / result["ms"] / (1e9 if self.bound is Bound.MATRIX else 1e6)
                best = rates.of(self.bound)
                result |= {"rate": rate, "of_device": None if best is None else rate / best}
            result["peers"] = {name: self._measure_peer(run, device) for name, run in self.peers.items()}
        return result

    def _measure_peer(self, run: Run, device: torch.device) -> dict[str, Any]:
        result = self._time(run, device)
        if "ms" in result:
            result["relative_error"] = self._relative_error(run)
        return result

    @staticmethod
    def _time(run: Run, device: torch.device) -> dict[str, Any]:
        try:
            return {"ms": milliseconds(run, device)}
        except Exception as error:  # recorded: other ops and peers still run
            lines = str(error).strip().splitlines()
            return {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]}

    def _relative_error(self, peer: Run) -> float | None:
        try:
            ours, theirs = self.ours(), peer()
        except Exception:
            return None  # the op's own error is in the result
        if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor) or ours.shape != theirs.shape:
            return None
        difference = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)
        return float(difference)


@contextmanager
def _threads_of_torch(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_peer(result: Mapping[str, Any]) -> tuple[str, float] | None:
    """The fastest peer of a measured case and its milliseconds, without those that gather pages."""
    times = {name: peer["ms"] for name, peer in result["peers"].items() if "ms" in peer and "gather" not in name}
    return min(times.items(), key=lambda item: item[1]) if times else None
