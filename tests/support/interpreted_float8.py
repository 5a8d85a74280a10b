"""Conversions of float8_e4m3fn in Triton's interpreter as GPUs make them.

The interpreter's own cut numbers off, or lose the carry of the exponent where they round: 31.9 becomes 16.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray


def decoded(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers of codes."""
    numbers: NDArray[np.float32] = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    return numbers


def round_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies until the end of the test. With a GPU nothing is interpreted, and nothing is changed."""
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter.InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(builder: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if dst_type.scalar == tl.float8e4nv:
            codes = torch.from_numpy(src.data.astype(np.float32)).to(torch.float8_e4m3fn)
            return interpreter.TensorHandle(codes.view(torch.uint8).numpy(), dst_type.scalar)
        if src.dtype.scalar == tl.float8e4nv:
            data = decoded(src.data).astype(interpreter._get_np_dtype(dst_type))
            return interpreter.TensorHandle(data, dst_type.scalar)
        return convert(builder, src, dst_type, rounding_mode)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)
