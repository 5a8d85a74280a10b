"""Upper bounds of logits by the instructions of each kind of x86-64 processor, as far as this one has them."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

import compiled
from processor_kinds import KINDS, address, compile_for
from quire_kernels.cpu.head_bounds import PackedHeadBounds, pack_head_bounds, rotate, rotation_for

PANEL, INPUTS = 32, 192


@pytest.fixture(scope="module", params=KINDS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_for(request.param, Path(__file__).with_name("logit_bounds.cpp"), tmp_path_factory.mktemp("bounds"))


def _check(library: ctypes.CDLL, rows: Tensor, head: Tensor) -> None:
    """No bound is below a logit, nor above it by more than some hundredths of the product of norms."""
    bounds = pack_head_bounds(compiled.thread_pool(), head)
    assert bounds is not None
    logits = rows.double() @ head.double().t()
    room = rows.double().norm(dim=1)[:, None] * head.double().norm(dim=1)
    padding = (0, -len(head) % PANEL)
    most, highest = (
        torch.nn.functional.pad(each, padding, value=-torch.inf).view(len(rows), -1, PANEL).amax(2)
        for each in (logits, logits + 0.05 * room + 1e-12)
    )
    found = _bounds(library, rows, bounds)
    assert (found >= most).all()
    assert (found <= highest).all()


def _bounds(library: ctypes.CDLL, rows: Tensor, bounds: PackedHeadBounds) -> Tensor:
    found = torch.empty(len(rows), -(-bounds.codes.outputs // PANEL))
    arguments = bounds.args()
    library.find_bounds(address(rows.contiguous()), ctypes.c_int64(len(rows)), ctypes.byref(arguments), address(found))
    return found.double()


@pytest.mark.parametrize("inputs", [16, 48, 64, 192, 576, 2048])
def test_of_random_numbers(library: ctypes.CDLL, inputs: int) -> None:
    torch.manual_seed(0)
    rows, head = torch.randn(17, inputs), torch.randn(3 * PANEL + 5, inputs)
    rows[1] *= 1e-25
    rows[2], head[3] = 0, 0
    rows[3, 5] = 1000
    head[4, 5], head[5] = 1000, 1e-25 * head[5]
    _check(library, rows, head)


@pytest.mark.parametrize("of_weights", [True, False], ids=["weights are codes", "rows are codes"])
def test_of_codes_in_the_direction_in_which_the_others_are_rounded(library: ctypes.CDLL, *, of_weights: bool) -> None:
    """The codes themselves have no error."""
    torch.manual_seed(0)
    turned = torch.randn(40, INPUTS)
    steps = turned.abs().amax(1, keepdim=True) / 127
    lost = turned - (turned / steps).round() * steps
    codes = (lost / lost.abs().amax(1, keepdim=True) * 127).round()
    others, in_codes = (rotate(each, rotation_for(INPUTS)) for each in (turned, codes))
    _check(library, *((others, in_codes) if of_weights else (in_codes, others)))


def test_of_sums_that_are_rounded(library: ctypes.CDLL) -> None:
    """Rows and weights are codes, and have no error. Their sums are beyond 2**24."""
    torch.manual_seed(0)
    codes = torch.randint(-127, 128, (40, 8192)).float()
    codes[:, 0] = 127
    turned = rotate(codes, rotation_for(8192))
    _check(library, turned, turned)


def test_of_logits_that_are_all_negative(library: ctypes.CDLL) -> None:
    """Padding of the last panel is not above them."""
    row = torch.randn(1, INPUTS)
    _check(library, row, -row.expand(PANEL + 5, -1).contiguous())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_of_a_row_that_is_not_finite(library: ctypes.CDLL, value: float) -> None:
    """No bound is below any logit."""
    rows = torch.randn(3, INPUTS)
    rows[1, 7] = value
    bounds = pack_head_bounds(compiled.thread_pool(), torch.randn(PANEL, INPUTS))
    assert bounds is not None
    found = _bounds(library, rows, bounds)
    assert not (found[1] < torch.inf).any()
    assert found[[0, 2]].isfinite().all()
