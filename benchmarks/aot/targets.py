"""The GPUs that kernels are compiled for, none of which has to be there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from quire_kernels._device import device_limits

_KIB = 1024
# Compute capability of the first NVIDIA GPUs with products and conversions of float8_e4m3fn: Ada Lovelace.
_FP8_CAPABILITY = 89

Launch = Callable[..., Any]
"""`JITFunction.run`: the function, its arguments, and `grid` and `warmup` as keywords."""


@dataclass(frozen=True)
class Target:
    """A GPU. `shared_bytes` is what one program may use; `max_spill_bytes` is what a kernel may spill of a thread's
    registers.
    """

    name: str
    gpu: GPUTarget
    multiprocessors: int
    shared_bytes: int
    max_spill_bytes: int

    @property
    def is_nvidia(self) -> bool:
        return bool(self.gpu.backend == "cuda")

    @property
    def has_fp8(self) -> bool:
        """Whether a worker serves with a cache in float8_e4m3fn on it."""
        return not self.is_nvidia or self.gpu.arch >= _FP8_CAPABILITY


def _nvidia(capability: int, multiprocessors: int, shared_kib: int, max_spill_bytes: int) -> Target:
    gpu = GPUTarget("cuda", capability, 32)
    return Target(f"sm_{capability}", gpu, multiprocessors, shared_kib * _KIB, max_spill_bytes)


TARGETS = {
    target.name: target
    for target in (
        _nvidia(80, 108, 163, 320),  # A100
        _nvidia(86, 84, 99, 64),  # A40, RTX 3090
        _nvidia(89, 142, 99, 64),  # L40S
        _nvidia(90, 132, 227, 0),  # H100, H200
        _nvidia(100, 148, 227, 64),  # B200
        _nvidia(120, 170, 99, 112),  # RTX 5090
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 304, 64 * _KIB, 980),  # MI300X
    )
}


class _AbsentDriver:
    """A driver of Triton for a GPU that is not there. Kernels are kept by device: each target is one of its own."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.utils = self

    def get_current_device(self) -> int:
        return list(TARGETS).index(self._target.name)

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target.gpu

    def get_device_properties(self, device: int) -> dict[str, int]:
        target = self._target
        return {"multiprocessor_count": target.multiprocessors, "max_shared_mem": target.shared_bytes}

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def intercepted_launches(target: Target, launch: Launch) -> Iterator[None]:
    """Until its end, wrappers of kernels believe that meta tensors are on the target, and `launch` is called instead of
    each launch.
    """
    run, drivers = JITFunction.run, triton.runtime.driver
    # Not `drivers.active`, which looks for a GPU
    active = drivers._active
    drivers.set_active(_AbsentDriver(target))
    device_limits.cache_clear()
    # A function, so that it becomes a method
    JITFunction.run = lambda function, *args, **options: launch(function, *args, **options)
    try:
        yield
    finally:
        JITFunction.run = run
        drivers._active = active
        device_limits.cache_clear()
