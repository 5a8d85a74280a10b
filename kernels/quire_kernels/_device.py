"""What a kernel's launch depends on of the device that it runs on."""

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True)
class DeviceLimits:
    """Figures of one GPU."""

    multiprocessors: int
    shared_memory: int  # bytes that one program may use


# Triton's interpreter stands in for a GPU: of this shape, so that tests launch what an H200 would.
H200 = DeviceLimits(multiprocessors=132, shared_memory=227 * 1024)


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The figures of the CUDA device that a tensor is on; of an H200 for the interpreter's CPU."""
    if device.type == "cpu":
        return H200
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return DeviceLimits(properties["multiprocessor_count"], properties["max_shared_mem"])
