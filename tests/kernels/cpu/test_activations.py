"""Activations against torch in float64, over all that a model computes them of."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from processor_kinds import KINDS, address, compile_for
from random_decoder import swiglu_oai


# Stated errors are those of fused operations.
@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != "none"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = Path(__file__).with_name("activations.cpp")
    return compile_for(request.param, source, tmp_path_factory.mktemp("activations"))


def values(end: float) -> Tensor:
    """Floats of [-end, end], evenly spaced and by each power of two, each sign, from 2**-40 on."""
    powers = torch.logspace(-40, torch.tensor(end).log2().item(), 1 << 17, base=2, dtype=torch.float64).float()
    return torch.cat([torch.linspace(-end, end, 1 << 20, dtype=torch.float64).float(), powers, -powers])


def computed(library: ctypes.CDLL, name: str, x: Tensor) -> Tensor:
    output = torch.empty_like(x)
    getattr(library, name)(address(x), ctypes.c_int64(len(x)), address(output))
    return output.double()


def units(exact: Tensor) -> Tensor:
    """Of the last place of a float32 of this size."""
    return torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 24)


def test_gelu_is_within_its_stated_error(library: ctypes.CDLL) -> None:
    x = values(40)
    exact = gelu(x.double())
    error = (computed(library, "gelu", x) - exact).abs()
    assert error[x < 0].max() <= 4e-7
    assert (error / units(exact))[x > 0].max() <= 4


@pytest.mark.parametrize(
    ("name", "function"),
    [("gelu_tanh", lambda x: gelu(x, approximate="tanh")), ("silu", silu)],
    ids=["gelu_tanh", "silu"],
)
def test_activations_by_exp2(library: ctypes.CDLL, name: str, function: Callable[[Tensor], Tensor]) -> None:
    x = values(40)
    torch.testing.assert_close(computed(library, name, x), function(x.double()), rtol=1e-6, atol=1e-6)


def test_swiglu_oai(library: ctypes.CDLL) -> None:
    """The gate's limit is above, those of up on both sides."""
    gate = torch.cat([values(40), torch.tensor([float("nan"), 1.0, 1e38, 0.0] * 4)])
    up = gate[torch.randperm(len(gate), generator=torch.Generator().manual_seed(1))]
    output = torch.empty_like(gate)
    library.swiglu_oai(address(gate), address(up), ctypes.c_int64(len(gate)), address(output))
    expected = swiglu_oai(gate.double(), up.double())
    torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert expected.isnan().sum() == 8


def test_soft_cap(library: ctypes.CDLL) -> None:
    x = values(200)
    torch.testing.assert_close(computed(library, "soft_cap", x), 30 * (x.double() / 30).tanh(), rtol=0, atol=1e-5)


def test_relu_leaves_nan(library: ctypes.CDLL) -> None:
    x = torch.cat([values(40), torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0] * 4)])
    torch.testing.assert_close(computed(library, "relu", x), relu(x.double()), rtol=0, atol=0, equal_nan=True)


def test_gelu_of_values_that_are_not_finite(library: ctypes.CDLL) -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0] * 4)
    expected = torch.tensor([float("nan"), float("inf"), 0.0, 0.0] * 4, dtype=torch.float64)
    torch.testing.assert_close(computed(library, "gelu", x), expected, equal_nan=True)
