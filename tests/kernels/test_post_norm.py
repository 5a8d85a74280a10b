"""Norms after sums against the reference, at odd widths; the residual stream becomes the norm, without rounding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire_kernels.post_norm import post_norm, post_norm_reference
from quire_kernels.row_norm import RowNorm

EPSILON = 1e-12
SIXTEEN_BITS = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def make_norm(device: str, width: int, dtype: torch.dtype = torch.float32) -> RowNorm:
    weight, bias = (torch.randn(width, device=device).to(dtype) for _ in range(2))
    return RowNorm(weight, EPSILON, bias, is_centered=True)


@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize("updated", ["updated", "alone"])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (3, 384), (5, 111), (2, 1025), (17, 2)])
def test_the_norm_of_the_sum_replaces_the_hidden_state(
    dtype: torch.dtype,
    updated: str,
    num_tokens: int,
    width: int,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, width, device=device) + 2.0
    # A part of wider rows
    update = (torch.randn(num_tokens, width + 1, device=device) - 1.0).to(dtype)[:, :width]
    norm = make_norm(device, width, dtype)
    actual, expected = hidden.clone(), hidden.clone()
    given = update if updated == "updated" else None
    normed = post_norm(actual, given, norm, dtype)
    assert_close(normed, post_norm_reference(expected, given, norm, dtype))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    summed = hidden if given is None else hidden + given.float()
    assert norm.bias is not None
    by_torch = F.layer_norm(summed, (width,), norm.weight.float(), norm.bias.float(), EPSILON)
    torch.testing.assert_close(actual, by_torch, rtol=1e-4, atol=1e-4)
    assert normed.is_contiguous()
    assert torch.equal(normed, actual.to(dtype))
    assert (normed is actual) == (dtype == torch.float32)


def test_no_tokens(device: str) -> None:
    assert post_norm(torch.zeros((0, 8), device=device), None, make_norm(device, 8), SIXTEEN_BITS).shape == (0, 8)


def test_a_row_that_is_not_finite_leaves_others_alone(device: str) -> None:
    hidden = torch.randn(5, 8, device=device)
    norm = make_norm(device, 8)
    expected = post_norm(hidden.clone(), None, norm, torch.float32)
    hidden[2] = float("nan")
    found = post_norm(hidden, None, norm, torch.float32)
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    assert bool(found[2].isnan().all())


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("hidden", {"hidden": torch.zeros(4, 8, dtype=torch.float16)}),
        ("hidden", {"hidden": torch.zeros(8, 4).T}),
        ("hidden", {"hidden": torch.zeros(4, 10)[:, :8]}),
        ("update", {"update": torch.zeros(3, 8)}),
        ("norm.weight", {"norm": RowNorm(torch.ones(7), EPSILON)}),
        ("dtype", {"dtype": torch.float64}),
    ],
)
def test_a_wrong_argument_is_named(argument: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(4, 8),
        "update": torch.zeros(4, 8),
        "norm": make_norm("cpu", 8),
        "dtype": torch.float32,
    }
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        post_norm(**arguments | changes)
