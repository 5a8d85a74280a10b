"""Activations, gated and plain, against torch's own, at odd widths."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.activation import (
    Activation,
    activation_product,
    activation_product_reference,
    gated_activation,
    gated_activation_reference,
    plain_activation,
    plain_activation_reference,
)

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
PLAIN = [activation for activation in Activation if activation is not Activation.SWIGLU_OAI]
FAR = [-3e4, -200.0, 0.0, 200.0, 3e4]
ACTIVE = [0.0, 0.0, 0.0, 200.0, 3e4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (2, 15), (3, 111), (1, 1536), (2, 2049), (17, 64)])
@pytest.mark.parametrize(
    ("op", "reference", "num_parts", "activation"),
    [(gated_activation, gated_activation_reference, 2, activation) for activation in Activation]
    + [(plain_activation, plain_activation_reference, 1, activation) for activation in PLAIN],
    ids=[f"gated-{activation.value}" for activation in Activation]
    + [f"plain-{activation.value}" for activation in PLAIN],
)
def test_activation(
    op: Any,
    reference: Any,
    num_parts: int,
    activation: Activation,
    dtype: torch.dtype,
    num_tokens: int,
    width: int,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    torch.manual_seed(0)
    # Slices of a wider row, with values large enough to show an approximation
    inputs = (torch.randn(num_tokens, num_parts * width + 8) * 3).to(device, dtype)[:, : num_parts * width]
    if width == 1:
        inputs = inputs.abs()  # not zero, of which no error is relative
    actual = op(inputs, activation)
    assert_close(actual, reference(inputs, activation))
    assert actual.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(2, 15), (3, 256), (2, 2049)])
@pytest.mark.parametrize("activation", PLAIN)
def test_activation_times_factors(
    activation: Activation,
    dtype: torch.dtype,
    num_tokens: int,
    width: int,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    torch.manual_seed(0)
    # Slices of wider rows
    inputs = (torch.randn(num_tokens, width + 8) * 3).to(device, dtype)[:, :width]
    factors = torch.randn(num_tokens, 3, width).to(device, dtype)[:, 1]
    actual = activation_product(inputs, factors, activation)
    assert_close(actual, activation_product_reference(inputs, factors, activation))
    assert torch.equal(actual, gated_activation(torch.cat((inputs, factors), 1), activation))
    assert actual.is_contiguous()


@pytest.mark.parametrize("activation", PLAIN)
def test_far_values_neither_overflow_nor_vanish(activation: Activation, device: str) -> None:
    inputs = torch.tensor([FAR], device=device)
    active = [value**2 for value in ACTIVE] if activation is Activation.RELU2 else ACTIVE
    assert plain_activation(inputs, activation).tolist() == [active]
    assert gated_activation(torch.cat((inputs, torch.ones_like(inputs)), 1), activation).tolist() == [active]


def test_swiglu_oai_is_that_of_gpt_oss(device: str) -> None:
    """Gate and up are clamped: the gate above, and up on both sides."""
    nan = float("nan")
    gate = torch.tensor([[-3e4, -1.0, 0.5, 9.0, 3e4, nan, 1.0]], device=device)
    up = torch.tensor([[1.0, -3e4, 0.25, 9.0, -2.0, 1.0, nan]], device=device)
    expected = [0.0, 6.0 / (1 + math.exp(1.702)), 0.625 / (1 + math.exp(-0.851)), 56.0, -7.0]
    actual = gated_activation(torch.cat((gate, up), 1), Activation.SWIGLU_OAI)[0].tolist()
    assert actual[:5] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert all(math.isnan(number) for number in actual[5:])
    with pytest.raises(ValueError, match=r"^activation: must be one of a single product"):
        plain_activation(gate, Activation.SWIGLU_OAI)


@pytest.mark.parametrize("activation", PLAIN)
def test_nan_stays_nan(activation: Activation, device: str) -> None:
    inputs = torch.tensor([[1.0, float("nan"), -1.0]], device=device)
    assert plain_activation(inputs, activation).isnan().tolist() == [[False, True, False]]


def test_no_tokens(device: str) -> None:
    assert gated_activation(torch.zeros((0, 8), device=device), Activation.SILU).shape == (0, 4)
    nothing = torch.zeros((0, 8), device=device)
    assert plain_activation(nothing, Activation.SILU).shape == (0, 8)
    assert activation_product(nothing, nothing, Activation.SILU).shape == (0, 8)


@pytest.mark.parametrize("change", [lambda rows: rows[0], lambda rows: rows.long(), lambda rows: rows.T])
def test_a_wrong_argument_is_named(change: Callable[[Tensor], Tensor], device: str) -> None:
    changed = change(torch.zeros((4, 8), device=device))
    for call, argument in ((gated_activation, "gate_up"), (plain_activation, "inputs")):
        with pytest.raises(ValueError, match=rf"^{argument}: "):
            partial(call, changed)(Activation.SILU)


def test_gate_and_up_have_the_same_width(device: str) -> None:
    with pytest.raises(ValueError, match=r"^gate_up: must have an even width"):
        gated_activation(torch.zeros((4, 7), device=device), Activation.SILU)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("inputs", {"inputs": torch.zeros(4)}),
        ("factors", {"factors": torch.zeros(4, 7)}),
        ("factors", {"factors": torch.zeros(8, 4).T}),
        ("factors", {"factors": torch.zeros(4, 8, dtype=torch.int64)}),
        ("activation", {"activation": Activation.SWIGLU_OAI}),
    ],
)
def test_a_wrong_argument_of_a_product_is_named(argument: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "inputs": torch.zeros(4, 8),
        "factors": torch.zeros(4, 8),
        "activation": Activation.SILU,
    }
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        activation_product(**arguments | change)
