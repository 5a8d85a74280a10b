"""What a case is, and the sizes and empty tensors that all of them share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8
DTYPE_NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", FP8: "fp8", INT8: "int8"}

META = torch.device("meta")
CONTEXT_LENGTH = 8192
NUM_TOKENS, NUM_ROWS = 64, 64


@dataclass(frozen=True)
class Case:
    """A call of a wrapper, in which its kernels are launched."""

    name: str
    call: Callable[[], object]
    dtype: torch.dtype = BF16
    """What is multiplied."""
    needs_fp8: bool = False


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor of a shape without memory: kernels are compiled for its dtype and strides."""
    return torch.empty(shape, dtype=dtype, device=META)
