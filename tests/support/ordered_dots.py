"""Matrix products of Triton's interpreter with a fixed order of summation, independent of the other rows.

The interpreter calls BLAS, where the bits of a row depend on its position in the tile.
"""

from typing import Any

import pytest
import torch

from interpreted_float8 import decoded


def _numbers(handle: Any) -> Any:
    import triton.language as tl

    return decoded(handle.data) if handle.dtype.scalar == tl.float8e4nv else handle.data


def order_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies until the end of the test. With a GPU nothing is interpreted, and nothing is changed."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def create_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        dtype = d.data.dtype
        left, right = (_numbers(each).astype(dtype) for each in (a, b))
        products = left[:, :, None] * right[None, :, :]
        return interpreter.TensorHandle(products.sum(axis=1, dtype=dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
