"""Products of every size against float64, and weights in 8 bits."""

import pytest
import torch
from torch import Tensor

import compiled
from quire_kernels.cpu.linear import MatrixFormat, linear, pack_matrix

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("rows", [0, 1, 2, 12, 13, 14, 15, 29, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (48, 97), (49, 31), (576, 960), (1536, 33), (2048, 40)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    x = torch.randn(rows, inputs).to(dtype)
    product = linear(compiled.thread_pool(), x, pack_matrix(compiled.thread_pool(), weight, bias))
    torch.testing.assert_close(product.double(), x.double() @ weight.double().t() + bias, rtol=1e-4, atol=1e-4)
    alone = linear(compiled.thread_pool(), x[-1:], pack_matrix(compiled.thread_pool(), weight, bias))
    assert torch.equal(alone, product[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_weights_are_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 576).to(dtype)
    weight[3] = 0
    identity = torch.eye(576, dtype=dtype)
    matrix = pack_matrix(compiled.thread_pool(), weight, matrix_format=MatrixFormat.INT8)
    restored = linear(compiled.thread_pool(), identity, matrix).t()
    step = weight.float().abs().amax(1, keepdim=True) / 127
    assert bool(((restored - weight.float()).abs() <= step * 0.501).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_were_in_8_bits_are_held_as_they_were(dtype: torch.dtype) -> None:
    """A product of a code and its scale is rounded by less than half a step."""
    torch.manual_seed(0)
    codes = torch.randint(-128, 128, (70, 576))
    codes[0] = 3
    scales = (torch.rand(70) + 0.01).to(dtype).float()
    weight = codes.float().mul(scales[:, None]).to(dtype)
    weight[5], scales[5] = torch.linspace(-1, 1, 576).to(dtype), 0.0
    matrix = pack_matrix(compiled.thread_pool(), weight, matrix_format=MatrixFormat.INT8, code_scales=scales)
    restored = linear(compiled.thread_pool(), torch.eye(576, dtype=dtype), matrix).t()
    scales[5] = 1 / 127
    codes[5] = (weight[5].float() * 127).round()
    torch.testing.assert_close(restored, codes * scales[:, None], rtol=1e-6, atol=0)


def _rounded_in_groups(rows: Tensor) -> Tensor:
    """Each group of 128 numbers of a row in 255 steps between the largest and its negative, float64."""
    padded = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % 128))
    groups = padded.view(len(rows), padded.shape[1] // 128, 128)
    peaks = groups.abs().amax(2, keepdim=True)
    codes = (groups * (torch.full_like(peaks, 127) / peaks)).round()
    return (codes.double() * (peaks / 127).double()).flatten(1)[:, : rows.shape[1]]


@pytest.mark.parametrize("rows", [0, 1, 2, 13, 14, 15, 29, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (2, 1), (48, 97), (127, 31), (576, 960), (1538, 33)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_codes(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    x = torch.randn(rows, inputs).to(dtype)
    matrix = pack_matrix(compiled.thread_pool(), weight, bias, matrix_format=MatrixFormat.W8A8)
    product = linear(compiled.thread_pool(), x, matrix)
    scales = (weight.float().abs().amax(1) / 127)[:, None]
    weights = (weight.float() / scales).round().double() * scales
    torch.testing.assert_close(product.double(), _rounded_in_groups(x) @ weights.t() + bias, rtol=1e-5, atol=1e-4)
    for alone in range(max(0, rows - 2), rows):
        assert torch.equal(linear(compiled.thread_pool(), x[alone : alone + 1], matrix), product[alone : alone + 1])


def test_the_largest_sums_of_codes_are_exact() -> None:
    weight, x = torch.ones(4, 1280), torch.ones(3, 1280)
    weight[1], x[1] = -1, -1
    weight[2, ::2], x[2, ::2] = -1, -1
    weight *= 127
    matrix = pack_matrix(compiled.thread_pool(), weight, matrix_format=MatrixFormat.W8A8)
    assert torch.equal(linear(compiled.thread_pool(), x * 127, matrix), x * 127 @ weight.t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_codes_may_be_zero_tiny_or_not_finite(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(40, 50).to(dtype), torch.randn(40), torch.randn(6, 50).to(dtype)
    x[0], x[1] = 0, 1e-38
    x[2, 3], x[3, 49], x[4, 0] = torch.nan, torch.inf, -torch.inf
    matrix = pack_matrix(compiled.thread_pool(), weight, bias, matrix_format=MatrixFormat.W8A8)
    product = linear(compiled.thread_pool(), x, matrix)
    torch.testing.assert_close(product[:2], bias.expand(2, 40))
    assert not bool(product[2:5].isfinite().any())
    assert torch.equal(product[5:], linear(compiled.thread_pool(), x[5:], matrix))


def test_weights_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype"):
        pack_matrix(compiled.thread_pool(), torch.zeros(2, 2, dtype=torch.float16))


@pytest.mark.parametrize(
    ("argument", "weight", "bias"),
    [
        ("bias", torch.zeros(64, 48), torch.zeros(20)),
        ("bias", torch.zeros(64, 48), torch.zeros(64, 1)),
        ("weight", torch.zeros(0, 48), None),
        ("weight", torch.zeros(64, 0), None),
        ("weight", torch.zeros(48), None),
    ],
)
def test_shapes_that_do_not_fit_are_refused(argument: str, weight: Tensor, bias: Tensor | None) -> None:
    for matrix_format in MatrixFormat:
        with pytest.raises(ValueError, match=f"^{argument}: "):
            pack_matrix(compiled.thread_pool(), weight, bias, matrix_format=matrix_format)
