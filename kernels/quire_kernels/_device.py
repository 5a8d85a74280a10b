"""Figures of a device that launches depend on."""

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True)
class DeviceLimits:
    multiprocessors: int
    shared_memory: int  # bytes that one program may use
    registers: int  # of 32 bits, of a multiprocessor
    warp_size: int  # threads
    runs_ptx: bool  # whether kernels may hold instructions of NVIDIA's GPUs
    is_hopper: bool  # four warps multiply together, with one operand from registers or shared memory


_HOPPER = 90
# In Triton's interpreter, launches are those of an H200, without the instructions, which it cannot run.
H200 = DeviceLimits(
    multiprocessors=132, shared_memory=227 * 1024, registers=64 * 1024, warp_size=32, runs_ptx=False, is_hopper=True
)


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Of a CUDA device; of an H200 for the interpreter's CPU."""
    if device.type == "cpu":
        return H200
    driver = triton.runtime.driver.active
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    target = driver.get_current_target()
    properties = driver.utils.get_device_properties(index)
    return DeviceLimits(
        properties["multiprocessor_count"],
        properties["max_shared_mem"],
        properties["max_num_regs"],
        properties["warpSize"],
        target.backend == "cuda",
        target.backend == "cuda" and target.arch == _HOPPER,
    )


def pipeline_stages(tile_bytes: int, device: torch.device) -> int:
    """num_stages of a loop over tiles of two matrices, together so large: 4, or as many as fit shared memory."""
    return max(2, min(4, device_limits(device).shared_memory // tile_bytes))
