"""Norms against the reference, at odd widths; the update is added to the residual stream without rounding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

EPSILON = 1e-5
SIXTEEN_BITS = torch.bfloat16 if torch.cuda.is_available() else torch.float16
Check = Callable[[Tensor, Tensor], None]


@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize("updated", ["updated", "alone"])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (3, 576), (5, 111), (2, 1025), (1, 5120), (17, 1)])
def test_add_and_norm(
    dtype: torch.dtype, updated: str, num_tokens: int, width: int, device: str, assert_close: Check
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, width + 3, device=device)
    update = torch.randn(num_tokens, width + 1, device=device).to(dtype)[:, :width] if updated == "updated" else None
    weight = torch.randn(width, device=device).to(dtype)
    actual, expected = hidden.clone()[:, :width], hidden.clone()[:, :width]
    normed = add_rms_norm(actual, update, weight, EPSILON)
    assert_close(normed, add_rms_norm_reference(expected, update, weight, EPSILON))
    assert normed.is_contiguous()
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 1, 64), (3, 9, 64), (5, 3, 80), (2, 17, 128)])
def test_norm_of_each_head(
    dtype: torch.dtype, num_tokens: int, num_heads: int, head_dim: int, device: str, assert_close: Check
) -> None:
    torch.manual_seed(0)
    # Heads are a part of a wider row
    heads = torch.randn(num_tokens, num_heads + 2, head_dim, device=device).to(dtype)[:, 1:-1]
    weight = torch.randn(head_dim, device=device).to(dtype)
    assert_close(rms_norm(heads, weight, EPSILON), rms_norm_reference(heads, weight, EPSILON))


def test_dtype_of_the_result_can_differ_from_the_weights(device: str) -> None:
    inputs, weight = torch.randn(3, 65, device=device), torch.randn(65, device=device)
    actual = rms_norm(inputs, weight, EPSILON, torch.float16)
    assert actual.dtype == torch.float16
    assert torch.equal(actual, rms_norm(inputs, weight, EPSILON).half())


def test_epsilon_keeps_zeros_zero(device: str) -> None:
    assert not rms_norm(torch.zeros(2, 33, device=device), torch.ones(33, device=device), EPSILON).any()


def test_no_tokens(device: str) -> None:
    assert add_rms_norm(torch.zeros(0, 8, device=device), None, torch.ones(8, device=device), EPSILON).shape == (0, 8)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("hidden", lambda hidden: hidden.half()),
        ("hidden", lambda hidden: hidden[0]),
        ("hidden", lambda hidden: hidden.T),
        ("update", lambda update: update[1:]),
        ("update", lambda update: update.long()),
        ("update", lambda update: update.T.contiguous().T),
        ("weight", lambda weight: weight[1:]),
        ("weight", lambda weight: weight.long()),
        ("dtype", lambda _: torch.int32),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: Callable[[Any], Any], device: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(4, 8, device=device),
        "update": torch.zeros(4, 8, device=device),
        "weight": torch.zeros(8, device=device),
        "epsilon": EPSILON,
        "dtype": None,
    }
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=f"^{argument}: "):
        add_rms_norm(**arguments)
