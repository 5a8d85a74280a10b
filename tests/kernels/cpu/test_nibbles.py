"""Weights in 4 bits against float64: sizes, groups, orders of inputs, zero points, and bits that rows share."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled
from nibble_weights import rounded, weight_of, with_minimums
from quire_kernels.cpu.linear import MatrixFormat, linear, pack_matrix, pack_nibbles
from quire_kernels.cpu.nibbles import GROUP_SIZES, NibbleWeight, quantize_in_nibbles, split_scales

DTYPES = [torch.float32, torch.bfloat16]
FORMATS = [MatrixFormat.W4A16, MatrixFormat.W4A8]


def multiply(x: Tensor, weight: NibbleWeight, matrix_format: MatrixFormat, num_threads: int = 2) -> Tensor:
    pool = compiled.thread_pool(num_threads)
    return linear(pool, x, pack_nibbles(pool, weight, matrix_format=matrix_format, dtype=x.dtype))


@pytest.mark.parametrize("rows", [0, 1, 2, 13, 14, 15, 29, 256])
@pytest.mark.parametrize(
    ("inputs", "outputs", "group"),
    [(1, 1, 32), (31, 2, 64), (48, 97, 32), (100, 40, 16), (127, 31, 128), (576, 960, 64), (1538, 33, 128)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("matrix_format", FORMATS, ids=lambda each: each.name)
def test_products(
    matrix_format: MatrixFormat, dtype: torch.dtype, inputs: int, outputs: int, group: int, rows: int
) -> None:
    torch.manual_seed(0)
    weight, bias = weight_of(outputs, inputs, group), torch.randn(outputs)
    x = torch.randn(rows, inputs).to(dtype)
    pool = compiled.thread_pool()
    matrix = pack_nibbles(pool, weight, bias, matrix_format=matrix_format, dtype=dtype)
    product = linear(pool, x, matrix)
    if matrix_format is MatrixFormat.W4A8:
        expected = rounded(x, weight) @ weight.dense().double().t() + bias
    else:
        expected = x.double() @ weight.dense().to(dtype).double().t() + bias
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-3)
    for first, end in ((rows - 1, rows), (0, 3), (1, 17)):
        if 0 <= first < end <= rows:
            assert torch.equal(linear(compiled.thread_pool(3), x[first:end], matrix), product[first:end])


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize(("inputs", "group"), [(32, 32), (96, 16), (576, 32), (1538, 64)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_may_be_floating_point_numbers(dtype: torch.dtype, inputs: int, group: int, rows: int) -> None:
    """Their scales are powers of two, so each number is exact in either type."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (70, inputs), dtype=torch.uint8)
    scales = torch.ldexp(torch.ones(70, -(-inputs // group)), torch.randint(-9, 3, (70, -(-inputs // group))))
    weight = NibbleWeight(codes, scales, torch.zeros_like(scales), group, is_e2m1=True)
    of_codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    numbers = of_codes[codes.int()] * 2 * scales.repeat_interleave(group, 1)[:, :inputs]
    assert torch.equal(weight.dense(), numbers)
    identity = torch.eye(inputs, dtype=dtype)
    assert torch.equal(multiply(identity, weight, MatrixFormat.W4A16).t(), numbers)
    x = torch.randn(rows, inputs).to(dtype)
    product = multiply(x, weight, MatrixFormat.W4A16)
    torch.testing.assert_close(product.double(), x.double() @ numbers.double().t(), rtol=1e-5, atol=1e-2)


def test_codes_that_are_floating_point_numbers_are_not_multiplied_as_integers() -> None:
    codes, scales = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1)
    weight = NibbleWeight(codes, scales, torch.zeros(4, 1), 32, is_e2m1=True)
    for refused, matrix_format in (
        (weight, MatrixFormat.W4A8),
        (replace(weight, has_minimums=True), MatrixFormat.W4A16),
    ):
        with pytest.raises(ValueError, match=r"^matrix_format: must be W4A16 where codes are numbers of e2m1"):
            multiply(torch.ones(1, 32), refused, matrix_format)


@pytest.mark.parametrize("rows", [1, 8, 9, 40])
@pytest.mark.parametrize(("inputs", "group"), [(32, 32), (96, 16), (576, 32), (1538, 64)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("matrix_format", FORMATS, ids=lambda each: each.name)
def test_groups_may_have_minimums(
    matrix_format: MatrixFormat, dtype: torch.dtype, inputs: int, group: int, rows: int
) -> None:
    torch.manual_seed(0)
    weight, x = with_minimums(70, inputs, group), torch.randn(rows, inputs).to(dtype)
    product = multiply(x, weight, matrix_format)
    if matrix_format is MatrixFormat.W4A8:
        expected = rounded(x, weight) @ weight.dense().double().t()
    else:
        expected = x.double() @ weight.dense().to(dtype).double().t()
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-3)
    for first, end in ((rows - 1, rows), (0, 3)):
        if 0 <= first < end <= rows:
            assert torch.equal(multiply(x[first:end], weight, matrix_format, 3), product[first:end])


def test_a_zero_point_of_8_is_the_same_as_a_minimum() -> None:
    torch.manual_seed(0)
    weight = weight_of(40, 96, 32, symmetric=True)
    x = torch.eye(96)
    turned = weight.with_minimums()
    assert torch.equal(turned.dense(), weight.dense())
    assert torch.equal(multiply(x, turned, MatrixFormat.W4A16), multiply(x, weight, MatrixFormat.W4A16))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("matrix_format", FORMATS, ids=lambda each: each.name)
def test_inputs_may_be_in_another_order(matrix_format: MatrixFormat, dtype: torch.dtype, group: int, rows: int) -> None:
    torch.manual_seed(0)
    weight, x = weight_of(70, 300, group, ordered=False), torch.randn(rows, 300).to(dtype)
    product = multiply(x, weight, matrix_format)
    is_w4a8 = matrix_format is MatrixFormat.W4A8
    numbers = rounded(x, weight) if is_w4a8 else x.double()
    expected = numbers @ weight.dense().to(torch.float32 if is_w4a8 else dtype).double().t()
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 14, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_w4a16_has_the_bits_of_a_dense_weight_with_the_same_numbers(dtype: torch.dtype, rows: int) -> None:
    """Scales are held times a power of two, which changes no bit of the mantissas."""
    torch.manual_seed(0)
    weight, x = weight_of(75, 200, 64), torch.randn(rows, 200).to(dtype)
    pool = compiled.thread_pool()
    expected = linear(pool, x, pack_matrix(pool, weight.dense().to(dtype)))
    assert torch.equal(multiply(x, weight, MatrixFormat.W4A16), expected)


def test_the_largest_sums_are_exact() -> None:
    weight = NibbleWeight(torch.full((4, 1280), 15, dtype=torch.uint8), torch.ones(4, 10), torch.zeros(4, 10), 128)
    weight.zeros[1] = 15
    weight.codes[1] = 0
    weight.codes[2, ::2] = 0
    x = 127 * torch.ones(3, 1280)
    x[1] *= -1
    x[2, ::2] *= -1
    assert torch.equal(multiply(x, weight, MatrixFormat.W4A8), x @ weight.dense().t())


@pytest.mark.parametrize("matrix_format", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_be_zero_tiny_or_not_finite(dtype: torch.dtype, matrix_format: MatrixFormat) -> None:
    torch.manual_seed(0)
    weight, x = weight_of(40, 50, 32), torch.randn(6, 50).to(dtype)
    x[0], x[1] = 0, 1e-38
    x[2, 3], x[3, 49], x[4, 0] = torch.nan, torch.inf, -torch.inf
    product = multiply(x, weight, matrix_format)
    torch.testing.assert_close(product[:2], torch.zeros(2, 40))
    assert not bool(product[2:5].isfinite().any())
    assert torch.equal(product[5:], multiply(x[5:], weight, matrix_format))


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_weights_are_nearer_than_those_of_the_whole_range(dtype: torch.dtype, group: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(33, 300).to(dtype)
    weight[5], weight[6, :group], weight[7] = 0, 2.5, weight[7].abs()
    found = quantize_in_nibbles(compiled.thread_pool(), weight, group)
    numbers = torch.nn.functional.pad(weight.float(), (0, -300 % group)).view(33, -1, group)
    step = (numbers.amax(2).clamp(min=0) - numbers.amin(2).clamp(max=0)) / 15
    off = (found.dense() - weight.float()).abs()
    assert bool((off <= 2.1 * step.repeat_interleave(group, 1)[:, :300]).all())
    error = (numbers / step[..., None].clamp(min=1e-30)).frac().abs()
    plain = torch.minimum(error, 1 - error).mul(step[..., None]).square().sum()
    assert float(off.square().sum()) < 1.02 * float(plain)
    assert float(off[5].abs().max()) == 0.0
    torch.testing.assert_close(found.dense()[6, :group], torch.full((group,), 2.5), rtol=1e-3, atol=0)


def test_a_dense_weight_is_rounded_when_it_is_packed() -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 90)
    pool = compiled.thread_pool()
    matrix = pack_matrix(pool, weight, matrix_format=MatrixFormat.W4A16)
    restored = linear(pool, torch.eye(90), matrix).t()
    torch.testing.assert_close(restored, quantize_in_nibbles(pool, weight).dense(), rtol=1e-6, atol=1e-7)


def test_a_weight_may_be_a_view() -> None:
    torch.manual_seed(0)
    pool, weight = compiled.thread_pool(), torch.randn(600, 500)
    expected, found = (quantize_in_nibbles(pool, each) for each in (weight.t().contiguous(), weight.t()))
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)
    turned = NibbleWeight(found.codes, found.scales.t().contiguous().t(), found.zeros.t().contiguous().t(), found.group)
    x = torch.randn(3, 600)
    assert torch.equal(multiply(x, turned, MatrixFormat.W4A16), multiply(x, found, MatrixFormat.W4A16))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("matrix_format", FORMATS, ids=lambda each: each.name)
def test_an_output_with_a_weight_that_is_not_finite_is_not(matrix_format: MatrixFormat, number: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 100)
    weight[3, 70] = number
    pool = compiled.thread_pool()
    product = linear(pool, torch.randn(5, 100), pack_matrix(pool, weight, matrix_format=matrix_format))
    is_finite = product.isfinite()
    assert not bool(is_finite[:, 3].any())
    assert int(is_finite.sum()) == 5 * 39


def test_scales_of_outputs_may_be_far_apart() -> None:
    torch.manual_seed(0)
    weight = weight_of(6, 64, 32)
    for output, size in enumerate((1e-30, 1e-6, 1.0, 1e4, 1e30, 0.0)):
        weight.scales[output] *= size
    halves, factors = split_scales(weight.scales)
    torch.testing.assert_close(halves.float() * factors[:, None], weight.scales, rtol=2**-11, atol=0)
    held = multiply(torch.eye(64), weight, MatrixFormat.W4A16).t()
    torch.testing.assert_close(held, weight.dense(), rtol=2**-11, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"scales": torch.ones(10, 2)},
        {"zeros": torch.ones(64, 1)},
        {"group": 20},
        {"order": torch.arange(10)},
        {"codes": torch.zeros(64, 48, dtype=torch.int64)},
        {"codes": torch.zeros(0, 48, dtype=torch.uint8)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^weight: "):
        multiply(torch.zeros(1, 48), replace(weight_of(64, 48, 32), **changes), MatrixFormat.W4A8)


def test_a_format_of_8_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^matrix_format: "):
        multiply(torch.zeros(1, 48), weight_of(64, 48, 32), MatrixFormat.GROUPED_W8A8)
