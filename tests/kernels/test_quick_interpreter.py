"""Kernels' tests use the quick interpreter, which leaves triton.language as it was."""

from typing import Any

import pytest
import torch
import triton
from triton import language as tl
from triton.language import core
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, nothing is interpreted")


@triton.jit  # type: ignore[untyped-decorator]
def _shares(numbers: Any, shares: Any, size: tl.constexpr) -> None:
    """Of the sum, which a function of Triton computes."""
    places = tl.arange(0, size)
    given = tl.load(numbers + places)
    tl.store(shares + places, given / tl.sum(given, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _fails(numbers: Any) -> None:
    tl.static_assert(False, "as it should")


def _language() -> dict[tuple[str, str], Any]:
    parts = {"tl": tl, "core": core, "tensor": tl.tensor, "math": tl.math, "dtype": tl.dtype}
    return {(part, name): value for part, owner in parts.items() for name, value in vars(owner).items()}


def test_a_kernel_computes_and_leaves_the_language_as_it_was() -> None:
    import quick_interpreter  # with a GPU, it is not to change Triton

    assert interpreter._patch_lang is quick_interpreter._replace
    before = _language()
    numbers, shares = torch.arange(1.0, 17.0), torch.zeros(16)
    for _ in range(2):
        _shares[(1,)](numbers, shares, size=16)
        torch.testing.assert_close(shares, numbers / numbers.sum())
    with pytest.raises(interpreter.InterpreterError, match="as it should"):
        _fails[(1,)](numbers)
    after = _language()
    assert after.keys() == before.keys()
    assert [name for name, was in before.items() if after[name] is not was] == []
