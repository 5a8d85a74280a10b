"""Products in 8 and 4 bits by the instructions of each kind of x86-64 processor, as far as this one has them."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nibble_weights import bytes_of, rounded, weight_of, with_minimums
from processor_kinds import KINDS, address, compile_for
from quire_kernels.cpu.nibbles import NibbleWeight

PANEL, GROUP, LANES = 32, 128, 16


@pytest.fixture(scope="module", params=KINDS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_for(request.param, Path(__file__).with_name("codes.cpp"), tmp_path_factory.mktemp("codes"))


def _products(library: ctypes.CDLL, rows: Tensor, weights: Tensor) -> Tensor:
    """The library's products of rows [count, inputs] and int8 weights [PANEL, inputs]."""
    count, inputs = rows.shape
    padded = torch.nn.functional.pad(rows, (0, -inputs % LANES)).contiguous()
    panel = torch.nn.functional.pad(weights, (0, -inputs % 4)).view(torch.uint8).bitwise_xor(128)
    panel = panel.view(PANEL, panel.shape[1] // 4, 4).transpose(0, 1).contiguous()
    sums = torch.empty(count, PANEL)
    sizes = map(ctypes.c_int64, (count, inputs, padded.shape[1]))
    library.products(address(padded), *sizes, address(panel), address(sums))
    return sums


def _rounded(rows: Tensor) -> Tensor:
    """Each group of a row in 255 steps between its largest number and the negative, float64."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % GROUP))
    groups = padded.view(len(rows), padded.shape[1] // GROUP, GROUP)
    peaks = groups.abs().amax(2, keepdim=True)
    codes = (groups * (torch.full_like(peaks, 127) / peaks)).round()
    return (codes.double() * (peaks / 127).double()).flatten(1)[:, : rows.shape[1]]


@pytest.mark.parametrize("inputs", [1, 4, 15, 127, 128, 129, 576, 1538])
def test_products(library: ctypes.CDLL, inputs: int) -> None:
    torch.manual_seed(0)
    rows, weights = torch.randn(17, inputs), torch.randint(-127, 128, (PANEL, inputs), dtype=torch.int8)
    expected = _rounded(rows) @ weights.double().t()
    torch.testing.assert_close(_products(library, rows, weights).double(), expected, rtol=1e-5, atol=1e-3)


def test_the_largest_codes_of_each_sign(library: ctypes.CDLL) -> None:
    """Sums of 16 bits would be too small for these."""
    rows, weights = torch.ones(3, 640), torch.full((PANEL, 640), 127, dtype=torch.int8)
    rows[1], rows[2, ::2], weights[1], weights[2, ::2] = -1, -1, -127, -127
    expected = (127 * rows) @ weights.float().t()
    assert torch.equal(_products(library, 127 * rows, weights), expected)


@pytest.mark.parametrize("make", [weight_of, with_minimums])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("inputs", [8, 16, 128, 136, 576, 1544])
def test_products_of_weights_in_4_bits(
    library: ctypes.CDLL, inputs: int, group: int, make: Callable[[int, int, int], NibbleWeight]
) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(17, inputs), make(PANEL, inputs, group)
    padded = torch.nn.functional.pad(rows, (0, -inputs % LANES)).contiguous()
    sums, numbers = torch.empty(17, PANEL), torch.empty(inputs, PANEL)
    held = weight.codes, weight.scales.half(), weight.zeros.half()
    addresses = list(map(address, held))
    sizes = map(ctypes.c_int64, (17, inputs, padded.shape[1]))
    form = ctypes.c_int64(group), ctypes.c_int64(weight.has_minimums)
    library.products_of_nibbles(address(padded), *sizes, *addresses, *form, address(sums))
    library.expanded_nibbles(ctypes.c_int64(inputs), *addresses, *form, address(numbers))
    # With fused multiply-add, a sum with a minimum is rounded once.
    torch.testing.assert_close(numbers.t(), weight.dense(), rtol=0, atol=1e-6 if weight.has_minimums else 0)
    expected = rounded(rows, weight) @ weight.dense().double().t()
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("minimums", [False, True], ids=["scales", "minimums"])
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("inputs", [4, 16, 36, 576, 1544])
def test_products_of_weights_in_groups_of_8_bits(
    library: ctypes.CDLL, inputs: int, group: int, *, minimums: bool
) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(17, inputs), bytes_of(PANEL, inputs, group, minimums=minimums)
    padded = torch.nn.functional.pad(rows, (0, -inputs % LANES)).contiguous()
    sums, numbers = torch.empty(17, PANEL), torch.empty(inputs, PANEL)
    held = weight.codes, weight.scales.half(), None if weight.minimums is None else weight.minimums.half()
    addresses = [None if each is None else address(each) for each in held]
    sizes = map(ctypes.c_int64, (17, inputs, padded.shape[1]))
    library.products_of_bytes(
        address(padded), *sizes, *addresses, ctypes.c_int64(group), address(sums), address(numbers)
    )
    torch.testing.assert_close(numbers.t(), weight.dense(), rtol=0, atol=1e-5 if minimums else 0)
    expected = rounded(rows, weight) @ weight.dense().double().t()
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=2e-3)
