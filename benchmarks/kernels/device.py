"""The device's own rates of copies and products, and the timing of calls."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from statistics import median
from typing import Any

import torch

from worker_svc.gpu.graphs import GraphCapture
from worker_svc.host import has_bfloat16

_CPU_SECONDS = 0.6
_CPU_ROUNDS = (3, 200)


class Bound(Enum):
    """What limits an op."""

    MEMORY = "GB/s"
    MATRIX = "TFLOP/s"
    LINK = "GB/s to the host"

    @property
    def unit(self) -> str:
        """The unit of its rates."""
        return self.value.partition(" ")[0]


@dataclass(frozen=True)
class DeviceRates:
    """Measured: `memory` counts bytes read and written, GB/s; `matrix` products, TFLOP/s, in bfloat16, or in
    float32 on a processor that has none in bfloat16; `link`, GB/s from the device to pinned host memory, None on a
    processor."""

    memory: float
    matrix: float
    link: float | None

    @classmethod
    def measure(cls, device: torch.device) -> "DeviceRates":
        link = _link_rate(device) if device.type == "cuda" else None
        return cls(_memory_rate(device), _matrix_rate(device), link)

    def of(self, bound: Bound) -> float | None:
        """The rate that bounds an op; None where the device has none."""
        return {Bound.MEMORY: self.memory, Bound.MATRIX: self.matrix, Bound.LINK: self.link}[bound]

    def to_json(self) -> dict[str, Any]:
        """As a result holds it."""
        return asdict(self)


def milliseconds(run: Callable[[], object], device: torch.device, *, captures: bool = True) -> float:
    """The median time of a warm call; on a GPU with its second-level cache emptied before each call, and as a CUDA
    graph where it can be captured, as steps run, unless `captures` is false: what it takes of the host is not measured
    then.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(_captured(run) if captures else run, warmup=25, rep=100, return_mode="median"))
    run()
    times: list[float] = []
    end = time.perf_counter() + _CPU_SECONDS
    while len(times) < _CPU_ROUNDS[0] or (time.perf_counter() < end and len(times) < _CPU_ROUNDS[1]):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return median(times) * 1e3


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    def work() -> None:
        run()

    try:
        return GraphCapture()(work)
    except RuntimeError:  # it waits for the device, or allocates pinned memory
        torch.cuda.synchronize()
        return run


def _memory_rate(device: torch.device) -> float:
    # Far larger than any cache
    source = torch.ones(2**31 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # In a graph a copy is no kernel, and runs at two thirds of the rate of one (H200).
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), device, captures=False) / 1e6


def _link_rate(device: torch.device) -> float:
    source = torch.ones(2**28, dtype=torch.uint8, device=device)
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    return source.nbytes / milliseconds(lambda: host.copy_(source, non_blocking=True), device) / 1e6


def _matrix_rate(device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 2048
    # Without instructions for it, torch multiplies bfloat16 tens of times as slowly.
    dtype = torch.bfloat16 if device.type == "cuda" or has_bfloat16() else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: torch.mm(left, right), device) / 1e9
