"""Norms against the reference, at odd widths; the update is added to the residual stream without rounding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire_kernels.row_norm import RowNorm, add_row_norm, add_row_norm_reference, row_norm, row_norm_reference

EPSILON = 1e-5
SIXTEEN_BITS = torch.bfloat16 if torch.cuda.is_available() else torch.float16
DTYPES = [torch.float32, SIXTEEN_BITS]
SHAPES = [(1, 64), (3, 576), (5, 111), (2, 1025), (1, 5120), (17, 2)]
Check = Callable[[Tensor, Tensor], None]


@pytest.fixture
def make_norm(device: str) -> Callable[..., RowNorm]:
    """Makes a norm of random weights: by the root mean square, or a layer norm with a bias."""

    def make(kind: str, width: int, dtype: torch.dtype = torch.float32) -> RowNorm:
        weight, bias = (torch.randn(width, device=device).to(dtype) for _ in range(2))
        if kind == "layer":
            return RowNorm(weight, EPSILON, bias, is_centered=True)
        return RowNorm(weight, EPSILON)

    return make


def make_rows(device: str, num_tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden states far from zero, and an update; both are parts of wider rows."""
    torch.manual_seed(0)
    hidden = (torch.randn(num_tokens, width + 3, device=device) + 2.0)[:, :width]
    return hidden, (torch.randn(num_tokens, width + 1, device=device) - 1.0).to(dtype)[:, :width]


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("updated", ["updated", "alone"])
@pytest.mark.parametrize(("num_tokens", "width"), SHAPES)
def test_add_and_norm(
    kind: str,
    dtype: torch.dtype,
    updated: str,
    num_tokens: int,
    width: int,
    make_norm: Callable[..., RowNorm],
    device: str,
    assert_close: Check,
) -> None:
    hidden, rows = make_rows(device, num_tokens, width, dtype)
    update, norm = rows if updated == "updated" else None, make_norm(kind, width, dtype)
    actual, expected = hidden.clone(), hidden.clone()
    normed = add_row_norm(actual, update, norm)
    assert_close(normed, add_row_norm_reference(expected, update, norm))
    assert normed.is_contiguous()
    assert torch.equal(actual, expected)
    if update is not None:
        assert torch.equal(expected, hidden + update)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    "kinds", [("rms", "rms"), ("layer", "layer"), ("rms", "layer"), ("layer", "rms")], ids="-".join
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(3, 576), (5, 111)])
def test_the_update_is_normalised_before_it_is_added(
    norm_first: bool,
    kinds: tuple[str, str],
    dtype: torch.dtype,
    num_tokens: int,
    width: int,
    make_norm: Callable[..., RowNorm],
    device: str,
    assert_close: Check,
) -> None:
    hidden, update = make_rows(device, num_tokens, width, dtype)
    norm, update_norm = (make_norm(kind, width, dtype) for kind in kinds)
    actual, expected = hidden.clone(), hidden.clone()
    options: dict[str, Any] = {"update_norm": update_norm, "norm_first": norm_first}
    normed = add_row_norm(actual, update, norm, **options)
    assert_close(normed, add_row_norm_reference(expected, update, norm, **options))
    assert_close(actual, expected)
    assert_close(expected, hidden + row_norm_reference(update, update_norm, torch.float32))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kinds", [("rms", "layer"), ("rms", None), (None, None)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_multiplied_by_a_scale(
    norm_first: bool,
    kinds: tuple[str | None, str | None],
    dtype: torch.dtype,
    make_norm: Callable[..., RowNorm],
    device: str,
    assert_close: Check,
) -> None:
    hidden, update = make_rows(device, 5, 111, dtype)
    norm, update_norm = (None if kind is None else make_norm(kind, 111, dtype) for kind in kinds)
    options: dict[str, Any] = {"update_norm": update_norm, "norm_first": norm_first}
    actual, expected, unscaled = hidden.clone(), hidden.clone(), hidden.clone()
    normed = add_row_norm(actual, update, norm, **options, sum_scale=-0.3)
    assert_close(normed, add_row_norm_reference(expected, update, norm, **options, sum_scale=-0.3))
    assert_close(actual, expected)
    add_row_norm(unscaled, update, norm, **options)
    assert_close(expected, unscaled * -0.3)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("updated", ["updated", "alone"])
def test_without_a_norm_the_sum_is_returned(
    norm_first: bool, updated: str, make_norm: Callable[..., RowNorm], device: str, assert_close: Check
) -> None:
    hidden, rows = make_rows(device, 5, 111, torch.float32)
    update, options = rows if updated == "updated" else None, {"norm_first": norm_first}
    update_norm = make_norm("rms", 111) if updated == "updated" else None
    actual, expected = hidden.clone(), hidden.clone()
    found = add_row_norm(actual, update, None, torch.float16, update_norm=update_norm, **options)
    wanted = add_row_norm_reference(expected, update, None, torch.float16, update_norm=update_norm, **options)
    assert_close(found, wanted)
    assert_close(actual, expected)
    assert_close(found, (hidden if norm_first else actual).half())
    assert add_row_norm(actual, None, None).dtype == torch.float32


def test_a_norm_that_comes_first_does_not_see_the_update(
    make_norm: Callable[..., RowNorm], device: str, assert_close: Check
) -> None:
    hidden, update = make_rows(device, 3, 65, torch.float32)
    norm, added = make_norm("layer", 65), hidden.clone()
    assert_close(add_row_norm(added, update, norm, norm_first=True), row_norm(hidden, norm))
    assert torch.equal(added, hidden + update)


def test_norms_are_those_of_torch(make_norm: Callable[..., RowNorm], device: str, assert_close: Check) -> None:
    hidden, _ = make_rows(device, 5, 111, torch.float32)
    layer, rms = make_norm("layer", 111), make_norm("rms", 111)
    assert_close(row_norm(hidden, layer), F.layer_norm(hidden, (111,), layer.weight, layer.bias, EPSILON))
    assert_close(row_norm(hidden, rms), F.rms_norm(hidden, (111,), rms.weight, EPSILON))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_dtype_of_the_result_can_differ_from_the_weights(
    kind: str, make_norm: Callable[..., RowNorm], device: str
) -> None:
    inputs, norm = torch.randn(3, 65, device=device), make_norm(kind, 65)
    actual = row_norm(inputs, norm, torch.float16)
    assert actual.dtype == torch.float16
    assert torch.equal(actual, row_norm(inputs, norm).half())


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_row_comes_to_the_same_bits_alone(kind: str, make_norm: Callable[..., RowNorm], device: str) -> None:
    rows, norm = torch.randn(17, 111, device=device), make_norm(kind, 111)
    together = row_norm(rows, norm)
    for row in range(17):
        assert torch.equal(row_norm(rows[row : row + 1], norm), together[row : row + 1])


def test_epsilon_keeps_zeros_zero(device: str) -> None:
    assert not row_norm(torch.zeros(2, 33, device=device), RowNorm(torch.ones(33, device=device), EPSILON)).any()


def test_equal_elements_have_a_layer_norm_of_the_bias(make_norm: Callable[..., RowNorm], device: str) -> None:
    norm = make_norm("layer", 33)
    torch.testing.assert_close(row_norm(torch.full((1, 33), 4.0, device=device), norm)[0], norm.bias, atol=1e-2, rtol=0)


def test_no_tokens(device: str) -> None:
    norm = RowNorm(torch.ones(8, device=device), EPSILON)
    assert add_row_norm(torch.zeros(0, 8, device=device), None, norm).shape == (0, 8)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("hidden", lambda hidden: hidden.half()),
        ("hidden", lambda hidden: hidden[0]),
        ("hidden", lambda hidden: hidden.T),
        ("update", lambda update: update[1:]),
        ("update", lambda update: update.long()),
        ("update", lambda update: update.T.contiguous().T),
        ("norm.weight", lambda norm: norm._replace(weight=norm.weight[1:])),
        ("norm.weight", lambda norm: norm._replace(weight=norm.weight.long())),
        ("norm.bias", lambda norm: norm._replace(bias=norm.weight[1:])),
        ("update_norm.weight", lambda norm: norm._replace(weight=norm.weight[1:])),
        ("update_norm.bias", lambda norm: norm._replace(bias=norm.weight.long())),
        ("dtype", lambda _: torch.int32),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: Callable[[Any], Any], device: str) -> None:
    norm = RowNorm(torch.zeros(8, device=device), EPSILON)
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(4, 8, device=device),
        "update": torch.zeros(4, 8, device=device),
        "norm": norm,
        "update_norm": norm,
        "dtype": None,
    }
    name = argument.split(".")[0]
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=f"^{argument}: "):
        add_row_norm(**arguments)


def test_a_scale_without_an_update_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"^sum_scale: must come with an update"):
        add_row_norm(torch.zeros(4, 8, device=device), None, None, sum_scale=2.0)
