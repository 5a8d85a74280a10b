"""Gated activations against torch's own, at odd widths."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.gated_activation import Activation, gated_activation, gated_activation_reference

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (2, 15), (3, 111), (1, 1536), (2, 2049), (17, 64)])
def test_activation(
    activation: Activation,
    dtype: torch.dtype,
    num_tokens: int,
    width: int,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    torch.manual_seed(0)
    # Slices of a wider row, with values large enough to show an approximation
    gate_up = (torch.randn(num_tokens, 2 * width + 8) * 3).to(device, dtype)[:, : 2 * width]
    assert_close(gated_activation(gate_up, activation), gated_activation_reference(gate_up, activation))


@pytest.mark.parametrize("activation", Activation)
def test_far_gates_neither_overflow_nor_vanish(activation: Activation, device: str) -> None:
    gate_up = torch.tensor([[-3e4, -200.0, 0.0, 200.0, 3e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert gated_activation(gate_up, activation).tolist() == [[0.0, 0.0, 0.0, 200.0, 3e4]]


def test_no_tokens(device: str) -> None:
    assert gated_activation(torch.zeros((0, 8), device=device), Activation.SILU).shape == (0, 4)


@pytest.mark.parametrize(
    "change", [lambda rows: rows[0], lambda rows: rows[:, :7], lambda rows: rows.long(), lambda rows: rows.T]
)
def test_a_wrong_argument_is_named(change: Callable[[Tensor], Tensor], device: str) -> None:
    with pytest.raises(ValueError, match=r"^gate_up: "):
        gated_activation(change(torch.zeros((4, 8), device=device)), Activation.SILU)
