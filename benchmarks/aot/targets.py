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
# Of a multiprocessor, and what each program takes of its shared memory on NVIDIA's GPUs beside its own
_NVIDIA_REGISTERS, _NVIDIA_RESERVED_BYTES = 64 * _KIB, _KIB
# Of a compute unit: vector units, and the registers that each of their 64 lanes has for all programs
_AMD_UNITS, _AMD_LANE_REGISTERS = 4, 512
_REGISTER_GRAIN = 8
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

    def resident_programs(self, num_registers: int, shared_bytes: int, num_warps: int) -> int:
        """How many programs of a kernel a multiprocessor runs at the same time, by the registers of a thread and the
        shared memory of a program.
        """
        registers = -(-num_registers // _REGISTER_GRAIN) * _REGISTER_GRAIN
        if self.is_nvidia:
            by_registers = _NVIDIA_REGISTERS // (registers * num_warps * self.gpu.warp_size)
            reserved = _NVIDIA_RESERVED_BYTES
        else:
            by_registers = _AMD_LANE_REGISTERS // registers * _AMD_UNITS // num_warps
            reserved = 0
        return int(min(by_registers, (self.shared_bytes + reserved) // (shared_bytes + reserved)))

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
        _nvidia(80, 108, 163, 24),  # A100
        _nvidia(86, 84, 99, 40),  # A40, RTX 3090
        _nvidia(89, 142, 99, 40),  # L40S
        # H100, H200; the limit is that of 64 rows by weights in groups of 32: a tile that spills none takes longer
        _nvidia(90, 132, 227, 528),
        _nvidia(100, 148, 227, 152),  # B200
        _nvidia(120, 170, 99, 64),  # RTX 5090
        # MI300X; the limit is that of latent attention in float32 over codes of 8 bits
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 304, 64 * _KIB, 836),
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
        return {
            "multiprocessor_count": target.multiprocessors,
            "max_shared_mem": target.shared_bytes,
            "max_num_regs": _NVIDIA_REGISTERS,
            "warpSize": target.gpu.warp_size,
        }

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
