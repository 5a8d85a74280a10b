"""A product of each head with weights of its own, at odd sizes and strides."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ordered_dots import order_dots
from quire_kernels.head_linear import head_linear, head_linear_reference


# The interpreter computes bfloat16 wrongly.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "inputs", "outputs"), [(1, 1, 1, 1), (3, 4, 12, 24), (65, 2, 33, 20), (7, 3, 128, 130)]
)
def test_products(
    num_tokens: int,
    num_heads: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    torch.manual_seed(0)
    # As in a model: parts of wider heads, and of weights that two products share
    values = torch.randn(num_tokens, num_heads, inputs + 5, device=device).to(dtype)[..., :inputs]
    weight = torch.randn(num_heads, outputs + 3, inputs, device=device).to(dtype)[:, 3:]
    expected = head_linear_reference(values, weight)
    assert_close(head_linear(values, weight), expected)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert_close(head_linear(values, turned), expected)
    wide = torch.full((num_tokens, num_heads, outputs + 4), 7.0, dtype=dtype, device=device)
    out = wide[..., :outputs]
    assert head_linear(values, weight, out=out) is out
    assert_close(out, expected)
    assert bool((wide[..., outputs:] == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_number_of_tokens_does_not_change_a_token(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    torch.manual_seed(0)
    values, weight = torch.randn(70, 2, 40, device=device).to(dtype), torch.randn(2, 20, 40, device=device).to(dtype)
    together = head_linear(values, weight)
    for token in (0, 31, 64, 69):
        assert torch.equal(head_linear(values[token : token + 1], weight), together[token : token + 1])


def test_no_tokens(device: str) -> None:
    assert head_linear(torch.empty(0, 2, 4, device=device), torch.empty(2, 3, 4, device=device)).shape == (0, 2, 3)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("inputs", {"inputs": torch.zeros(3, 8)}),
        ("inputs", {"inputs": torch.zeros(3, 2, 4, dtype=torch.int32)}),
        ("inputs", {"inputs": torch.zeros(3, 4, 2).transpose(1, 2)}),
        ("weight", {"weight": torch.zeros(3, 5, 4)}),
        ("weight", {"weight": torch.zeros(2, 5, 3)}),
        ("weight", {"weight": torch.zeros(2, 5, 4).half()}),
        ("out", {"out": torch.zeros(3, 2, 4)}),
        ("out", {"out": torch.zeros(3, 2, 5).half()}),
    ],
)
def test_a_wrong_argument_is_named(argument: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"inputs": torch.zeros(3, 2, 4), "weight": torch.zeros(2, 5, 4)}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        head_linear(**arguments | changes)
