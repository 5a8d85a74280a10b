"""Tokens without a bit are suppressed; faulty logits stay."""

import pytest
import torch

from quire_kernels.adjust_logits import SUPPRESSED
from quire_kernels.mask_logits import mask_logits, mask_logits_reference


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97, 2048, 4099])
def test_tokens_without_a_bit_are_suppressed(vocab_size: int, device: str) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(7, vocab_size, device=device)
    logits[5, 0], logits[2, vocab_size // 2] = float("nan"), float("inf")
    rows = torch.tensor([5, 0, 2], device=device)
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32) + 1), dtype=torch.int32, device=device)
    bits[1] = -1
    masked, expected = logits.clone(), logits.clone()
    mask_logits(masked, rows, bits)
    mask_logits_reference(expected, rows, bits)
    assert torch.equal(masked.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(masked[[0, 1, 3, 4, 6]], logits[[0, 1, 3, 4, 6]])
    assert masked[5, 0].isnan()
    for token in range(vocab_size):
        is_allowed = int(bits[2, token // 32]) >> (token % 32) & 1
        expected_logit = logits[2, token] if is_allowed or token == vocab_size // 2 else SUPPRESSED.value
        assert masked[2, token] == expected_logit


def test_rows_of_a_wider_tensor(device: str) -> None:
    wide = torch.zeros(4, 200, device=device)
    mask_logits(wide[:, :97], torch.tensor([3], device=device), torch.zeros(1, 4, dtype=torch.int32, device=device))
    assert (wide[3, :97] == SUPPRESSED.value).all()
    assert not wide[:3].any()
    assert not wide[:, 97:].any()


def test_nothing_to_mask(device: str) -> None:
    logits = torch.ones(2, 5, device=device)
    mask_logits(
        logits, torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, 1, dtype=torch.int32, device=device)
    )
    assert (logits == 1).all()


def test_what_does_not_fit_is_refused(device: str) -> None:
    logits, rows = torch.zeros(2, 97, device=device), torch.tensor([1], device=device)
    with pytest.raises(ValueError, match="bits"):
        mask_logits(logits, rows, torch.zeros(1, 3, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="rows"):
        mask_logits(logits, rows.int(), torch.zeros(1, 4, dtype=torch.int32, device=device))
