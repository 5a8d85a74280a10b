"""Products of codes against the reference, at odd sizes; the bits of a row do not depend on other rows."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import quire_kernels.scaled_linear as scaled_linear_module
from ordered_dots import order_dots
from quire_kernels.coded_rows import CodedRows, RowCoding, code_rows_reference
from quire_kernels.group_by_expert import group_by_expert
from quire_kernels.kv_quantization import MAX_CODES
from quire_kernels.scaled_linear import (
    CodedMatrix,
    grouped_scaled_linear,
    grouped_scaled_linear_reference,
    scaled_linear,
    scaled_linear_reference,
)

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
CODINGS = [RowCoding(dtype, group) for dtype in (torch.int8, torch.float8_e4m3fn) for group in (None, 128)]


def case(coding: RowCoding, rows: int, inputs: int, outputs: int, device: str) -> tuple[CodedRows, CodedMatrix, Tensor]:
    torch.manual_seed(0)
    weight = code_rows_reference(torch.randn(outputs, inputs), coding)
    matrix = CodedMatrix(weight.codes.to(device), weight.scales.t().contiguous().to(device))
    coded = code_rows_reference(torch.randn(rows, inputs).to(device), coding)
    return coded, matrix, torch.randn(outputs).to(device)


def absolute(codes: Tensor) -> Tensor:
    return codes.float().abs().clamp(max=MAX_CODES[codes.dtype]).to(codes.dtype)


def assert_products(
    product: Tensor, expected: Tensor, bound: Tensor, magnitudes: Tensor, coding: RowCoding, device: str
) -> None:
    """`magnitudes` are sums of the absolute values. Hopper's tensor cores keep 13 bits of the largest of some products
    of float8, and cut the others off at its last bit.
    """
    if coding.dtype == torch.float8_e4m3fn and device == "cuda":
        bound = bound + magnitudes * 2**-10
    assert bool(((product.float() - expected.float()).abs() <= bound).all())


@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 1, 1), (2, 15, 17), (16, 128, 65), (17, 300, 97), (65, 576, 129), (3, 256, 512)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(coding: RowCoding, rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: str) -> None:
    coded, matrix, bias = case(coding, rows, inputs, outputs, device)
    if len(matrix.scales) == 1:
        coding = RowCoding(coding.dtype)
    assert matrix.coding == coding
    for added in (None, bias.to(dtype)):
        product = scaled_linear(coded, matrix, added, dtype)
        assert product.dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2 if dtype == torch.bfloat16 else 2e-3
        expected = scaled_linear_reference(coded, matrix, added, dtype)
        magnitudes = coded.decoded(coding.group).abs() @ matrix.dense().abs().t()
        assert_products(product, expected, tolerance * (1 + expected.abs()), magnitudes, coding, device)


def test_torch_multiplies_float8_of_one_scale_in_bfloat16_on_a_gpu() -> None:
    def asks(
        coding: RowCoding,
        inputs: int = 256,
        outputs: int = 512,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
    ) -> bool:
        groups = coding.num_groups(inputs)
        with FakeTensorMode(allow_non_fake_inputs=True):
            rows = CodedRows(torch.empty(3, inputs, dtype=coding.dtype, device=device), torch.empty(3, groups))
            matrix = CodedMatrix(torch.empty(outputs, inputs, dtype=coding.dtype), torch.empty(groups, outputs))
        return scaled_linear_module._torch_multiplies(rows, matrix, dtype)

    float8 = RowCoding(torch.float8_e4m3fn)
    assert asks(float8)
    assert not asks(float8, device="cpu")
    assert not asks(RowCoding(torch.int8))
    assert not asks(RowCoding(torch.float8_e4m3fn, 128))
    assert not asks(float8, dtype=torch.float16)
    assert not asks(float8, inputs=200)
    assert not asks(float8, outputs=500)


def test_tiles_do_not_depend_on_rows_in_deterministic_mode(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles: list[int] = []
    monkeypatch.setattr(scaled_linear_module, "_launch", lambda *arguments: tiles.append(arguments[-1]))
    for num_rows in (1, 16, 17, 70):
        coded, matrix, bias = case(RowCoding(torch.float8_e4m3fn), num_rows, 256, 512, device)
        for deterministic in (False, True):
            scaled_linear(coded, matrix, bias, torch.float32, deterministic=deterministic)
    assert tiles == [16, 64, 16, 64, 64, 64, 64, 64]


def test_sums_of_int8_are_exact(device: str) -> None:
    coded, matrix, _ = case(RowCoding(torch.int8), 3, 4096, 33, device)
    sums = coded.codes.cpu().long() @ matrix.codes.cpu().long().t()
    expected = sums.float().to(device) * coded.scales * matrix.scales
    assert torch.equal(scaled_linear(coded, matrix, None, torch.float32), expected)


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_a_row_comes_to_the_same_bits_however_many_there_are(
    coding: RowCoding, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    coded, matrix, bias = case(coding, 70, 300, 40, device)

    def product(first: int, end: int) -> Tensor:
        some = CodedRows(coded.codes[first:end], coded.scales[first:end])
        return scaled_linear(some, matrix, bias, torch.float32, deterministic=True)

    together = product(0, 70)
    for first, end in ((0, 1), (5, 6), (64, 65), (3, 19), (6, 69)):
        assert torch.equal(product(first, end), together[first:end])


@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize(("num_tokens", "inputs", "outputs"), [(1, 15, 34), (17, 300, 34), (35, 128, 130)])
def test_products_with_the_weights_of_experts(
    coding: RowCoding, tile_rows: int, num_tokens: int, inputs: int, outputs: int, device: str
) -> None:
    """Expert 0 has no row, and the scales of experts differ."""
    torch.manual_seed(0)
    experts = torch.tensor([[3, 1 + token % 2] for token in range(num_tokens)], dtype=torch.int32, device=device)
    groups = group_by_expert(experts, 4, tile_rows)
    weights = [code_rows_reference(torch.randn(outputs, inputs) * 2**each, coding) for each in range(4)]
    matrix = CodedMatrix(
        torch.stack([each.codes for each in weights]).to(device),
        torch.stack([each.scales.t() for each in weights]).contiguous().to(device),
    )
    for rows_each in (1, 2):
        rows = code_rows_reference(torch.randn(num_tokens * 2 // rows_each, inputs).to(device), coding)
        bias = torch.randn(4, outputs, device=device)
        arguments = rows, matrix, groups, num_tokens * 2, torch.float32, bias
        expected = grouped_scaled_linear_reference(*arguments)
        positive = CodedRows(absolute(rows.codes), rows.scales), CodedMatrix(absolute(matrix.codes), matrix.scales)
        magnitudes = grouped_scaled_linear_reference(*positive, groups, num_tokens * 2, torch.float32)
        bound = 1e-3 + 1e-4 * expected.abs()
        assert_products(grouped_scaled_linear(*arguments), expected, bound, magnitudes, coding, device)


def test_a_scale_that_is_not_a_number_is_seen(device: str) -> None:
    coded, matrix, _ = case(RowCoding(torch.int8), 3, 64, 8, device)
    coded.scales[1] = torch.nan
    assert scaled_linear(coded, matrix, None, torch.float32).isnan().all(1).tolist() == [False, True, False]


def test_no_rows(device: str) -> None:
    coded, matrix, bias = case(RowCoding(torch.int8), 0, 64, 8, device)
    assert scaled_linear(coded, matrix, bias, torch.float32).shape == (0, 8)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("weight", lambda all_of: {"weight": all_of["weight"]._replace(codes=all_of["weight"].codes.short())}),
        ("weight", lambda all_of: {"weight": all_of["weight"]._replace(scales=torch.ones(2, 8))}),
        ("weight", lambda all_of: {"weight": all_of["weight"]._replace(scales=torch.ones(1, 8).half())}),
        ("rows", lambda all_of: {"rows": all_of["rows"]._replace(codes=all_of["rows"].codes[:, :9])}),
        ("rows", lambda all_of: {"rows": all_of["rows"]._replace(codes=all_of["rows"].codes.to(torch.uint8))}),
        ("rows", lambda all_of: {"rows": all_of["rows"]._replace(scales=torch.ones(3, 2))}),
        ("bias", lambda _: {"bias": torch.ones(7)}),
        ("dtype", lambda _: {"dtype": torch.int32}),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: Any) -> None:
    rows, weight, bias = case(RowCoding(torch.int8), 3, 64, 8, "cpu")
    arguments: dict[str, Any] = {"rows": rows, "weight": weight, "bias": bias, "dtype": torch.float32}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        scaled_linear(**arguments | change(arguments))
