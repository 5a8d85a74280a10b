"""bfloat16 in Triton's interpreter as GPUs compute it.

The interpreter keeps bfloat16 as uint16. Its own conversions cut numbers off or round ties up, and its products are
those of the uint16.
"""

from typing import Any

import pytest
import torch


def round_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies until the end of the test. With a GPU nothing is interpreted, and nothing is changed.

    Conversions round to the nearest, ties to even. Matrix products sum in float32. Other arithmetic in bfloat16 raises
    TypeError: kernels compute in float32. torch.mm takes an `out_dtype`, as it does on a GPU.
    """
    if torch.cuda.is_available():
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder_type, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, convert, dot = builder_type.cast_impl, builder_type.create_fp_to_fp, builder_type.create_dot
    binary, unary, fma = builder_type.binary_op, builder_type.unary_op, builder_type.create_fma

    def widened(src: Any) -> Any:
        """In float32, which holds every number of bfloat16."""
        if src.dtype.scalar != tl.bfloat16:
            return src
        return handle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def converted(src: Any, dst_type: Any, by_interpreter: Any) -> Any:
        if dst_type.scalar == src.dtype.scalar:
            return src
        if dst_type.scalar == tl.bfloat16:
            numbers = np.asarray(widened(src).data, dtype=np.float32)
            codes = torch.from_numpy(numbers.copy()).bfloat16().view(torch.uint16).numpy()
            return handle(codes, tl.bfloat16)
        return by_interpreter(widened(src))

    def cast_impl(builder: Any, src: Any, dst_type: Any) -> Any:
        return converted(src, dst_type, lambda wide: cast(builder, wide, dst_type))

    def create_fp_to_fp(builder: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return converted(src, dst_type, lambda wide: convert(builder, wide, dst_type, rounding_mode))

    def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(builder, widened(a), widened(b), *others)

    def refuse(*operands: Any) -> None:
        if any(operand.dtype.scalar == tl.bfloat16 for operand in operands):
            raise TypeError("arithmetic in bfloat16, which Triton's interpreter does not compute")

    def binary_op(builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        refuse(lhs, rhs)
        return binary(builder, lhs, rhs, op)

    def unary_op(builder: Any, arg: Any, op: Any) -> Any:
        refuse(arg)
        return unary(builder, arg, op)

    def create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
        refuse(x, y, z)
        return fma(builder, x, y, z)

    for function in (cast_impl, create_fp_to_fp, create_dot, binary_op, unary_op, create_fma):
        monkeypatch.setattr(builder_type, function.__name__, function)

    mm = torch.mm

    def into_dtype(left: Any, right: Any, *, out_dtype: torch.dtype | None = None, out: Any = None) -> Any:
        if out_dtype is not None:
            left, right = left.to(out_dtype), right.to(out_dtype)
        return mm(left, right, out=out)

    monkeypatch.setattr(torch, "mm", into_dtype)
