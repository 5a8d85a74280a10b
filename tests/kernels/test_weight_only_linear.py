"""Products with weights in 8 and 4 bits against the reference, at odd sizes; the bits of a row do not depend on other
rows.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import quire_kernels.weight_only_linear as weight_only_linear_module
from nibble_weights import weight_of
from ordered_dots import order_dots
from quire_kernels._code_words import WORDS
from quire_kernels._device import H200
from quire_kernels.cpu.nibbles import GROUP_SIZES, NibbleWeight
from quire_kernels.group_by_expert import group_by_expert
from quire_kernels.round_to_nibbles import round_to_nibbles
from quire_kernels.weight_only_linear import (
    grouped_weight_only_linear,
    grouped_weight_only_linear_reference,
    weight_only_linear,
    weight_only_linear_reference,
)
from quire_kernels.weight_only_matrix import WeightOnlyMatrix
from weight_only_matrices import KINDS, in_4_bits, matrix_of

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group"),
    [
        *((1, 1, 1, 32), (2, 15, 17, 16), (16, 64, 65, 32), (17, 300, 97, 128), (64, 300, 129, 64), (3, 100, 500, 16)),
        *((130, 200, 129, 64), (40, 160, 130, 32)),
    ],
)
def test_products(kind: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, group: int, device: str) -> None:
    matrix = matrix_of(kind, inputs, outputs, group, device)
    values, bias = torch.randn(rows, inputs).to(device, dtype), torch.randn(outputs).to(device, dtype)
    for added in (None, bias):
        product = weight_only_linear(values, matrix, added)
        expected = weight_only_linear_reference(values, matrix, added)
        # bfloat16 has 8 bits, so that two roundings of one number differ by 2 ** -7.
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}[dtype]
        size = inputs**0.5
        if rows > weight_only_linear_module._MOST_ROWS[matrix.bits] and device == "cuda":
            # torch multiplies, and also rounds sums of parts of the inputs, which may be larger than the whole sum.
            tolerance *= 2
            size *= max(1.0, float(matrix.dense().square().mean().sqrt()))
        torch.testing.assert_close(product, expected, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_a_row_comes_to_the_same_bits_however_many_there_are(
    kind: str, group: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    matrix = matrix_of(kind, 200, 40, group, device)
    values, bias = torch.randn(70, 200).to(device, torch.float16), torch.randn(40).to(device, torch.float16)
    together = weight_only_linear(values, matrix, bias, deterministic=True)
    expected = weight_only_linear_reference(values, matrix, bias)
    torch.testing.assert_close(together, expected, rtol=1e-3, atol=1e-2)
    for first, end in ((0, 1), (5, 6), (64, 65), (3, 19), (6, 69)):
        few = weight_only_linear(values[first:end], matrix, bias, deterministic=True)
        assert torch.equal(few, together[first:end])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize(("num_tokens", "inputs", "outputs"), [(1, 15, 34), (17, 200, 34), (35, 64, 70)])
def test_products_with_the_weights_of_experts(
    kind: str, tile_rows: int, num_tokens: int, inputs: int, outputs: int, device: str
) -> None:
    """Expert 0 has no row, and the scales of experts differ."""
    experts = torch.tensor([[3, 1 + token % 2] for token in range(num_tokens)], dtype=torch.int32, device=device)
    groups = group_by_expert(experts, 4, tile_rows)
    one = matrix_of(kind, inputs, outputs, 32, device)
    stacked: WeightOnlyMatrix = tree_map(_for_experts, one)
    for rows_each in (1, 2):
        values = torch.randn(num_tokens * 2 // rows_each, inputs).to(device)
        arguments = values, stacked, groups, num_tokens * 2, torch.randn(4, outputs, device=device)
        expected = grouped_weight_only_linear_reference(*arguments)
        torch.testing.assert_close(grouped_weight_only_linear(*arguments), expected, rtol=1e-4, atol=1e-2)


def _for_experts(leaf: Any) -> Any:
    """A tensor for each of four experts: factors in other sizes, codes and their scales in another order."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dtype == torch.float32:
        return torch.stack([leaf * (1 + expert) for expert in range(4)])
    return torch.stack([leaf.roll(expert, 0) for expert in range(4)])


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 31), (5, 64), (40, 200)])
def test_halves_are_the_same_codes(outputs: int, inputs: int, device: str) -> None:
    weight = weight_of(outputs, inputs, 32)
    torch.testing.assert_close(in_4_bits(weight, device).dense().cpu(), weight.dense(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 100), (64, 576)])
def test_weights_are_rounded_as_by_compiled_code(outputs: int, inputs: int, group: int, device: str) -> None:
    import compiled
    from quire_kernels.cpu.nibbles import quantize_in_nibbles

    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs)
    weight[0, 0] = 0.0
    expected = quantize_in_nibbles(compiled.thread_pool(), weight, group)
    actual = round_to_nibbles(weight.to(device), group)
    # Where two steps have nearly the same error, the order of its sum decides.
    equal = (actual.scales.cpu() == expected.scales) & (actual.zeros.cpu() == expected.zeros)
    assert float(equal.float().mean()) > 0.99
    errors = [float((each.dense() - weight).square().sum()) for each in (_on_host(actual), expected)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)


def _on_host(weight: NibbleWeight) -> NibbleWeight:
    return NibbleWeight(weight.codes.cpu(), weight.scales.cpu(), weight.zeros.cpu(), weight.group)


def test_a_weight_that_is_not_finite_has_no_scale(device: str) -> None:
    weight = torch.ones(2, 64, device=device)
    weight[1, 40] = torch.nan
    assert round_to_nibbles(weight, 32).scales.isnan().tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize(
    ("is_hopper", "dtype", "by_rows", "always"),
    [
        (True, torch.float16, [16, 16, 32, 64], 64),
        (False, torch.float16, [16, 16, 64, 64], 64),
        (True, torch.float32, [32] * 4, 32),
    ],
    ids=str,
)
def test_tiles_do_not_depend_on_rows_in_deterministic_mode(
    is_hopper: bool, dtype: torch.dtype, by_rows: list[int], always: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, tiles = matrix_of("4 bits", 64, 8, 32, device), list[int]()
    monkeypatch.setattr(weight_only_linear_module, "device_limits", lambda _: replace(H200, is_hopper=is_hopper))
    monkeypatch.setattr(weight_only_linear_module, "_launch", lambda *arguments: tiles.append(arguments[-1]))
    for deterministic in (False, True):
        for num_rows in (1, 16, 17, 64):
            values = torch.zeros(num_rows, 64, device=device, dtype=dtype)
            weight_only_linear(values, matrix, deterministic=deterministic)
    assert tiles == [*by_rows, *[always] * 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tile_rows", [16, 32, 64])
@pytest.mark.parametrize("shared_kib", [227, 99, 64])
def test_a_tile_fits_the_shared_memory(kind: str, dtype: torch.dtype, tile_rows: int, shared_kib: int) -> None:
    limits = replace(H200, shared_memory=shared_kib * 1024, is_hopper=shared_kib == 227)
    for group in GROUP_SIZES:
        matrix = matrix_of(kind, 512, 8, group, "cpu")
        outputs, num_warps, num_stages = weight_only_linear_module._choose_tile(matrix, dtype, tile_rows, limits)
        words, inputs = outputs * WORDS * 4, tile_rows * 32 // matrix.bits * WORDS * dtype.itemsize
        assert (num_stages - 1) * (words + inputs) <= limits.shared_memory
        assert outputs * tile_rows <= 32 * num_warps * 64, "sums of a thread"


def test_no_rows(device: str) -> None:
    matrix = matrix_of("4 bits", 64, 8, 32, device)
    assert weight_only_linear(torch.zeros(0, 64, device=device), matrix).shape == (0, 8)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("inputs", {"inputs": torch.zeros(64)}),
        ("inputs", {"inputs": torch.zeros(3, 65)}),
        ("bias", {"bias": torch.zeros(9)}),
        ("weight", {"inputs": 65}),
        ("weight", {"group": None}),
        ("weight", {"group": 48}),
        ("weight", {"group": 64}),
        ("weight", {"scales": torch.zeros(9)}),
        ("weight", {"pairs": None}),
        ("weight", {"pairs": torch.zeros(2, 8)}),
        ("weight", {"minimum_factors": torch.zeros(9)}),
        ("weight", {"words": torch.zeros(8, 32)}),
        ("weight", {"words": torch.zeros(8, 33, dtype=torch.int32)}),
        ("weight", {"bits": 5}),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"inputs": torch.zeros(3, 64), "weight": matrix_of("4 bits", 64, 8, 32, "cpu")}
    if argument == "weight":
        arguments["weight"] = arguments["weight"]._replace(**change)
    else:
        arguments |= change
    with pytest.raises(ValueError, match=f"^{argument}: "):
        weight_only_linear(**arguments)
