"""Weights in 8 bits with groups against float64: sizes, groups, minimums, and bits that rows share."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled
from nibble_weights import bytes_of, rounded
from quire_kernels.cpu.grouped_bytes import BYTE_GROUP_SIZES, ByteWeight, quantize_in_bytes
from quire_kernels.cpu.linear import MatrixFormat, linear, pack_grouped_bytes, pack_matrix

DTYPES = [torch.float32, torch.bfloat16]
FORMATS = [MatrixFormat.GROUPED_W8A16, MatrixFormat.GROUPED_W8A8]
has_minimums = pytest.mark.parametrize("minimums", [False, True], ids=["scales", "minimums"])


def multiply(x: Tensor, weight: ByteWeight, matrix_format: MatrixFormat, num_threads: int = 2) -> Tensor:
    pool = compiled.thread_pool(num_threads)
    return linear(pool, x, pack_grouped_bytes(pool, weight, matrix_format=matrix_format, dtype=x.dtype))


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 17, 256])
@pytest.mark.parametrize(
    ("inputs", "outputs", "group"),
    [(1, 1, 32), (31, 2, 16), (48, 97, 32), (127, 31, 16), (576, 960, 32), (1538, 33, 16)],
)
@has_minimums
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("matrix_format", FORMATS, ids=lambda each: each.name)
def test_products(
    matrix_format: MatrixFormat, dtype: torch.dtype, inputs: int, outputs: int, group: int, rows: int, *, minimums: bool
) -> None:
    torch.manual_seed(0)
    weight, bias = bytes_of(outputs, inputs, group, minimums=minimums), torch.randn(outputs)
    x = torch.randn(rows, inputs).to(dtype)
    pool = compiled.thread_pool()
    matrix = pack_grouped_bytes(pool, weight, bias, matrix_format=matrix_format, dtype=dtype)
    product = linear(pool, x, matrix)
    if matrix_format is MatrixFormat.GROUPED_W8A8:
        expected = rounded(x, weight) @ weight.dense().double().t() + bias
    else:
        expected = x.double() @ weight.dense().to(dtype).double().t() + bias
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=2e-3)
    for first, end in ((rows - 1, rows), (0, 3), (1, 17)):
        if 0 <= first < end <= rows:
            for num_threads in (1, 3):
                assert torch.equal(linear(compiled.thread_pool(num_threads), x[first:end], matrix), product[first:end])


@has_minimums
@pytest.mark.parametrize("rows", [1, 14, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_16_bits_have_the_bits_of_a_dense_weight_with_the_same_numbers(
    dtype: torch.dtype, rows: int, *, minimums: bool
) -> None:
    torch.manual_seed(0)
    weight, x = bytes_of(75, 200, 16), torch.randn(rows, 200).to(dtype)
    if minimums:  # of few bits, so that float32 adds them without an error
        weight = ByteWeight(weight.codes, weight.scales.bfloat16().float(), 16, weight.scales.bfloat16().float() * -128)
    pool = compiled.thread_pool()
    expected = linear(pool, x, pack_matrix(pool, weight.dense().to(dtype)))
    assert torch.equal(multiply(x, weight, MatrixFormat.GROUPED_W8A16), expected)


def test_the_largest_sums_are_exact() -> None:
    weight = ByteWeight(torch.full((4, 640), 127, dtype=torch.int8), torch.ones(4, 20), 32)
    weight.codes[1] = -128
    weight.codes[2, ::2] = -128
    x = 127 * torch.ones(3, 640)
    x[1] *= -1
    x[2, ::2] *= -1
    assert torch.equal(multiply(x, weight, MatrixFormat.GROUPED_W8A8), x @ weight.dense().t())


@pytest.mark.parametrize("matrix_format", FORMATS, ids=lambda each: each.name)
def test_rows_may_be_zero_tiny_or_not_finite(matrix_format: MatrixFormat) -> None:
    torch.manual_seed(0)
    weight, x = bytes_of(40, 50, 32, minimums=True), torch.randn(6, 50)
    x[0], x[1] = 0, 1e-38
    x[2, 3], x[3, 49], x[4, 0] = torch.nan, torch.inf, -torch.inf
    product = multiply(x, weight, matrix_format)
    torch.testing.assert_close(product[:2], torch.zeros(2, 40))
    assert not bool(product[2:5].isfinite().any())
    assert torch.equal(product[5:], multiply(x[5:], weight, matrix_format))


@pytest.mark.parametrize("group", BYTE_GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dense_weight_is_rounded_to_the_nearest_steps(dtype: torch.dtype, group: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 90).to(dtype)
    weight[5] = 0
    found = quantize_in_bytes(weight, group)
    off = (found.dense() - weight.float()).abs()
    assert bool((off <= found.scales.repeat_interleave(group, 1)[:, :90] * 0.54).all())
    assert float(off[5].max()) == 0
    half = multiply(torch.eye(90), quantize_in_bytes(weight, group), MatrixFormat.GROUPED_W8A16).t()
    torch.testing.assert_close(half, found.dense(), rtol=1e-6, atol=0)


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


def test_groups_may_be_cut() -> None:
    torch.manual_seed(0)
    weight = bytes_of(3, 80, 32, minimums=True)
    assert torch.equal(weight.in_groups(16).dense(), weight.dense())


@pytest.mark.parametrize(
    "changes",
    [
        {"scales": torch.ones(64, 1)},
        {"minimums": torch.ones(10, 2)},
        {"group": 24},
        {"codes": torch.zeros(64, 48)},
        {"codes": torch.zeros(64, 0, dtype=torch.int8)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^weight: "):
        multiply(torch.zeros(1, 48), replace(bytes_of(64, 48, 32), **changes), MatrixFormat.GROUPED_W8A8)


def test_a_format_of_4_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^matrix_format: "):
        multiply(torch.zeros(1, 48), bytes_of(64, 48, 32), MatrixFormat.W4A8)
