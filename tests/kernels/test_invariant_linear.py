"""Products against those of torch, at odd sizes; the bits of a row do not depend on other rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ordered_dots import order_dots
from quire_kernels.invariant_linear import invariant_linear, invariant_linear_reference

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def _random(rows: int, inputs: int, outputs: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    values = torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
    first, second, third = (value.to(device, dtype) for value in values)
    return first, second, third


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 1, 1), (2, 15, 17), (63, 64, 65), (65, 111, 97), (17, 576, 129), (3, 48, 500)]
)
def test_products(
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    values, weight, bias = _random(rows, inputs, outputs, device, dtype)
    assert_close(invariant_linear(values, weight), invariant_linear_reference(values, weight))
    assert_close(invariant_linear(values, weight, bias), invariant_linear_reference(values, weight, bias))


def test_sums_can_be_written_in_float32(device: str) -> None:
    values, weight, bias = _random(5, 64, 33, device, torch.float16)
    wide = torch.full((7, 33), 9.0, device=device)
    assert invariant_linear(values, weight, bias, out=wide[:5]) is not None
    expected = values.double() @ weight.double().T + bias.double()
    assert torch.allclose(wide[:5].double(), expected, atol=1e-5)
    assert (wide[5:] == 9.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_comes_to_the_same_bits_however_many_there_are(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    values, weight, bias = _random(130, 111, 97, device, dtype)
    together = invariant_linear(values, weight, bias)
    for first, end in ((0, 1), (5, 6), (64, 65), (3, 19), (60, 129)):
        assert torch.equal(invariant_linear(values[first:end], weight, bias), together[first:end])


def test_no_rows(device: str) -> None:
    assert invariant_linear(torch.zeros(0, 8, device=device), torch.zeros(4, 8, device=device)).shape == (0, 4)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("inputs", lambda rows: rows[0]),
        ("inputs", lambda rows: rows.T),
        ("inputs", lambda rows: rows.long()),
        ("weight", lambda rows: rows.half()),
        ("weight", lambda rows: rows[:, :7]),
        ("bias", lambda rows: rows[:3]),
        ("out", lambda rows: rows.double()),
        ("out", lambda rows: rows[:, :2]),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: Callable[[Tensor], Tensor], device: str) -> None:
    arguments = {"inputs": (6, 8), "weight": (4, 8), "bias": (4,), "out": (6, 4)}
    tensors = {name: torch.zeros(shape, device=device) for name, shape in arguments.items()}
    tensors[argument] = change(tensors[argument])
    with pytest.raises(ValueError, match=f"^{argument}: "):
        invariant_linear(**tensors)
