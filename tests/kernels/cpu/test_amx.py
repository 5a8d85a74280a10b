"""Products by tile registers against float64."""

import pytest
import torch

import compiled
from nibble_weights import bytes_of, weight_of, with_minimums
from quire_kernels.cpu.amx import DEPTH, amx_linear, has_amx, pack_for_amx
from quire_kernels.cpu.linear import MatrixFormat, PackedMatrix, linear, pack_grouped_bytes, pack_nibbles
from quire_kernels.cpu.nibbles import quantize_in_nibbles

pytestmark = pytest.mark.skipif(not has_amx(compiled.thread_pool()), reason="needs AMX")

# Of the sum of all products' absolute values: 8 bits of each factor, or 16.
TOLERANCES = {torch.float32: 2.0**-15, torch.bfloat16: 2.0**-22}


def assert_rows_alone(x: torch.Tensor, matrix: PackedMatrix, product: torch.Tensor) -> None:
    """A row has the same bits alone: the first one, those at the border of two groups of tiles, and the last one."""
    for row in (0, 255, 256, len(x) - 1):
        if 0 <= row < len(x):
            assert torch.equal(amx_linear(compiled.thread_pool(), x[row : row + 1], matrix), product[row : row + 1])


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 600])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(2, 1), (48, 97), (49, 31), (384, 1152), (704, 1152), (1312, 1152), (9000, 33)]
)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_products(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    x = torch.randn(rows, inputs).to(dtype)
    matrix = pack_for_amx(compiled.thread_pool(), weight, bias)
    product = amx_linear(compiled.thread_pool(), x, matrix)
    exact = x.double() @ weight.double().t() + bias
    sizes = x.double().abs() @ weight.double().abs().t() + bias.abs()
    assert bool(((product - exact).abs() <= sizes * TOLERANCES[dtype] + 1e-6).all())
    assert_rows_alone(x, matrix, product)


@pytest.mark.parametrize("rows", [1, 16, 33, 200, 600])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 97), (384, 1152), (704, 1152)])
def test_products_with_weights_of_8_bits(rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs)
    x = torch.randn(rows, inputs).bfloat16()
    matrix = pack_for_amx(compiled.thread_pool(), weight, bias, matrix_format=MatrixFormat.INT8)
    scales = weight.float().abs().amax(1) / 127
    rounded = (weight.float() / scales[:, None]).round() * scales[:, None]
    exact = x.double() @ rounded.double().t() + bias
    product = amx_linear(compiled.thread_pool(), x, matrix)
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-4)
    assert_rows_alone(x, matrix, product)


@pytest.mark.parametrize("rows", [1, 33, 600])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 97), (200, 33), (384, 1152), (704, 97)])
def test_products_with_weights_of_4_bits(rows: int, inputs: int, outputs: int) -> None:
    """They are those of a dense weight with the same numbers."""
    torch.manual_seed(0)
    pool, x = compiled.thread_pool(), torch.randn(rows, inputs).bfloat16()
    nibbles = quantize_in_nibbles(pool, torch.randn(outputs, inputs))
    matrix_format = MatrixFormat.W4A16
    matrix = pack_nibbles(pool, nibbles, matrix_format=matrix_format, dtype=torch.bfloat16, input_multiple=DEPTH)
    dense = pack_for_amx(pool, nibbles.dense().bfloat16())
    assert torch.equal(amx_linear(pool, x, matrix), amx_linear(pool, x, dense))


@pytest.mark.parametrize("rows", [1, 11, 12, 13, 16, 17, 33, 64, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 97), (64, 32), (192, 33), (576, 960), (1536, 576)])
def test_products_in_8_bits_have_the_bits_of_those_without_tile_registers(rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    pool, x = compiled.thread_pool(), torch.randn(rows, inputs).bfloat16()
    x[:, 5] *= 100
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs)
    matrix = pack_for_amx(pool, weight, bias, matrix_format=MatrixFormat.W8A8)
    assert torch.equal(amx_linear(pool, x, matrix), linear(pool, x, matrix))


@pytest.mark.parametrize("rows", [1, 12, 16, 17, 33, 64, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 97), (384, 64), (1536, 33), (200, 33)])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("minimums", [False, True], ids=["scales", "minimums"])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_in_groups_have_the_bits_of_those_without_tile_registers(
    bits: int, group: int, rows: int, inputs: int, outputs: int, *, minimums: bool
) -> None:
    """Inputs that are no multiple of a group are computed without."""
    torch.manual_seed(0)
    pool, x = compiled.thread_pool(), torch.randn(rows, inputs).bfloat16()
    x[:, 5] *= 100
    if bits == 4:
        nibbles = with_minimums(outputs, inputs, group) if minimums else weight_of(outputs, inputs, group)
        matrix = pack_nibbles(pool, nibbles, matrix_format=MatrixFormat.W4A8, dtype=torch.bfloat16)
    else:
        weight = bytes_of(outputs, inputs, group, minimums=minimums)
        matrix = pack_grouped_bytes(pool, weight, matrix_format=MatrixFormat.GROUPED_W8A8, dtype=torch.bfloat16)
    assert torch.equal(amx_linear(pool, x, matrix), linear(pool, x, matrix))


def test_a_number_in_8_bits_that_is_not_finite_reaches_its_row_alone() -> None:
    pool, x = compiled.thread_pool(), torch.ones(33, 128).bfloat16()
    x[17, 3] = float("inf")
    matrix = pack_for_amx(pool, torch.ones(64, 128).bfloat16(), matrix_format=MatrixFormat.W8A8)
    assert amx_linear(pool, x, matrix).isfinite().all(1).tolist() == [row != 17 for row in range(33)]


def test_weights_of_float32_in_8_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="matrix_format: must be PLAIN for float32"):
        pack_for_amx(compiled.thread_pool(), torch.zeros(2, 64), matrix_format=MatrixFormat.INT8)


def test_inputs_of_another_size_are_refused() -> None:
    matrix = pack_for_amx(compiled.thread_pool(), torch.zeros(2, 64))
    with pytest.raises(ValueError, match="inputs"):
        amx_linear(compiled.thread_pool(), torch.zeros(1, 96), matrix)
