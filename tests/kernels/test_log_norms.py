"""Logarithms of sums of exponentials against torch's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.log_norms import log_norms, log_norms_reference


@pytest.mark.parametrize("vocab_size", [1, 15, 111, 4096, 4097, 9001])
@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_norms(vocab_size: int, spread: float, device: str) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, vocab_size + 3) * spread).to(device)[:, :vocab_size]
    assert torch.allclose(log_norms(logits), log_norms_reference(logits), rtol=1e-6, atol=1e-5)


def test_a_row_comes_to_the_same_bits_alone(device: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 5003, device=device) * 4
    together = log_norms(logits)
    for row in range(9):
        assert torch.equal(log_norms(logits[row : row + 1]), together[row : row + 1])


def test_a_row_of_no_numbers_leaves_the_others_alone(device: str) -> None:
    logits = torch.zeros(3, 8, device=device)
    logits[1, 3] = float("nan")
    norms = log_norms(logits)
    assert norms.isnan().tolist() == [False, True, False]


def test_no_rows(device: str) -> None:
    assert log_norms(torch.zeros(0, 8, device=device)).shape == (0,)


@pytest.mark.parametrize("change", [lambda rows: rows[0], lambda rows: rows.half(), lambda rows: rows[:, :0]])
def test_a_wrong_argument_is_named(change: Callable[[Tensor], Tensor], device: str) -> None:
    with pytest.raises(ValueError, match=r"^logits: "):
        log_norms(change(torch.zeros((4, 8), device=device)))
