"""Rows in codes against the reference, at odd widths: alone, after an activation and after a norm."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreted_float8 import round_float8
from quire_kernels.activation import Activation
from quire_kernels.coded_rows import (
    CodedRows,
    RowCoding,
    code_activation,
    code_activation_product,
    code_activation_product_reference,
    code_activation_reference,
    code_rows,
    code_rows_reference,
)
from quire_kernels.row_norm import (
    RowNorm,
    add_row_norm_codes,
    add_row_norm_codes_reference,
    row_norm,
    row_norm_codes,
)

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
CODINGS = [RowCoding(dtype, group) for dtype in (torch.int8, torch.float8_e4m3fn) for group in (None, 128)] + [
    RowCoding(torch.int8, 16)
]
SHAPES = [(1, 1), (3, 111), (2, 576), (5, 2049), (17, 64), (2, 4100)]


@pytest.fixture(autouse=True)
def _rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    round_float8(monkeypatch)


def steps_from_zero(codes: Tensor) -> Tensor:
    """Codes as whole numbers, one for each number that a code may stand for: both zeros of float8 are 0."""
    bits = codes.view(torch.int8).int()
    return bits if codes.dtype == torch.int8 else torch.where(bits < 0, -(bits & 127), bits)


def assert_codes(actual: CodedRows, expected: CodedRows) -> None:
    """The same scales but for their last bits, and codes at most one step apart, where those decide a tie. A negative
    number that rounds to zero may have either sign: processors differ in what they make of it.
    """
    torch.testing.assert_close(actual.scales, expected.scales, rtol=1e-6, atol=0, equal_nan=True)
    steps = steps_from_zero(actual.codes) - steps_from_zero(expected.codes)
    assert int(steps.abs().max()) <= 1
    assert float((steps != 0).float().mean()) < 0.01
    assert actual.codes.is_contiguous()
    assert actual.scales.is_contiguous()


def rows_of(device: str, dtype: torch.dtype, num_rows: int, width: int) -> Tensor:
    """A part of wider rows, of different sizes."""
    torch.manual_seed(0)
    rows = torch.randn(num_rows, width + 3) * torch.logspace(-3, 3, num_rows)[:, None]
    return rows.to(device, dtype)[:, :width]


@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), SHAPES)
def test_rows(coding: RowCoding, dtype: torch.dtype, num_rows: int, width: int, device: str) -> None:
    rows = rows_of(device, dtype, num_rows, width)
    coded = code_rows(rows, coding)
    assert_codes(coded, code_rows_reference(rows, coding))
    step = 1 / 254 if coding.dtype == torch.int8 else 1 / 8
    largest = rows.float().abs().amax(1, keepdim=True)
    assert (coded.decoded(coding.group) - rows.float()).abs().le(largest * step * 1.01).all()


@pytest.mark.parametrize(
    ("activation", "is_gated"),
    [(activation, True) for activation in Activation]
    + [(activation, False) for activation in Activation if activation is not Activation.SWIGLU_OAI],
)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize("width", [64, 111, 2049])
def test_activations(activation: Activation, is_gated: bool, coding: RowCoding, width: int, device: str) -> None:
    rows = rows_of(device, torch.float16, 3, 2 * width if is_gated else width)
    coded = code_activation(rows, activation, coding, is_gated=is_gated)
    assert_codes(coded, code_activation_reference(rows, activation, coding, is_gated=is_gated))


@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize("width", [24, 256, 2049])
def test_activations_times_factors(coding: RowCoding, width: int, device: str) -> None:
    rows, factors = (rows_of(device, torch.float16, 3, width) for _ in range(2))
    coded = code_activation_product(rows, factors, Activation.GELU_TANH, coding)
    assert_codes(coded, code_activation_product_reference(rows, factors, Activation.GELU_TANH, coding))
    together = code_activation(torch.cat((rows, factors), 1), Activation.GELU_TANH, coding, is_gated=True)
    assert torch.equal(coded.codes.view(torch.int8), together.codes.view(torch.int8))
    assert torch.equal(coded.scales, together.scales)


@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("added", ["alone", "added", "normed and added", "norm first", "scaled"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (3, 576), (5, 111), (17, 2)])
def test_norms(coding: RowCoding, kind: str, added: str, num_rows: int, width: int, device: str) -> None:
    torch.manual_seed(0)
    hidden, update = torch.randn(2, num_rows, width, device=device) + 1.0
    weight, bias = torch.randn(2, width, device=device)
    norm = RowNorm(weight, 1e-5, bias, is_centered=True) if kind == "layer" else RowNorm(weight, 1e-5)
    how: dict[str, Any] = {
        "update_norm": norm if added == "normed and added" else None,
        "norm_first": added == "norm first",
        "sum_scale": 0.3 if added == "scaled" else None,
    }
    actual, expected = hidden.clone(), hidden.clone()
    change = None if added == "alone" else update
    coded = add_row_norm_codes(actual, change, norm, coding, **how)
    assert_codes(coded, add_row_norm_codes_reference(expected, change, norm, coding, **how))
    torch.testing.assert_close(actual, expected)
    if added == "alone":
        again = row_norm_codes(hidden, norm, coding)
        assert torch.equal(again.codes.view(torch.int8), coded.codes.view(torch.int8))
        assert_codes(again, code_rows(row_norm(hidden, norm, torch.float32), coding))


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_a_row_comes_to_the_same_codes_alone(coding: RowCoding, device: str) -> None:
    rows = rows_of(device, torch.float32, 9, 300)
    together = code_rows(rows, coding)
    for row in range(9):
        alone = code_rows(rows[row : row + 1], coding)
        assert torch.equal(alone.codes.view(torch.int8), together.codes[row : row + 1].view(torch.int8))
        assert torch.equal(alone.scales, together.scales[row : row + 1])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("coding", CODINGS, ids=str)
# The interpreter warns of codes that have no meaning
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning")
def test_a_number_that_is_not_finite_stays_visible(number: float, coding: RowCoding, device: str) -> None:
    rows = rows_of(device, torch.float32, 3, 300)
    rows[1, 200] = number
    for coded in (code_rows(rows, coding), row_norm_codes(rows, RowNorm(torch.ones(300, device=device), 1e-5), coding)):
        assert coded.scales.isnan().any(1).tolist() == [False, True, False]


def test_zeros_and_no_rows(device: str) -> None:
    coding = RowCoding(torch.int8)
    coded = code_rows(torch.zeros(2, 33, device=device), coding)
    assert not coded.decoded().any()
    assert code_rows(torch.zeros(0, 33, device=device), coding).codes.shape == (0, 33)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("inputs", {"inputs": torch.zeros(8)}),
        ("inputs", {"inputs": torch.zeros(4, 8).long()}),
        ("coding", {"coding": RowCoding(torch.float16)}),
        ("coding", {"coding": RowCoding(torch.int8, 24)}),
        ("coding", {"coding": RowCoding(torch.int8, 2048)}),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: dict[str, Any], device: str) -> None:
    arguments: dict[str, Any] = {"inputs": torch.zeros(4, 8, device=device), "coding": RowCoding(torch.int8)} | change
    call: Callable[..., CodedRows] = code_rows
    with pytest.raises(ValueError, match=f"^{argument}: "):
        call(**arguments)
