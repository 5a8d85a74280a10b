"""Greedy rows get the token that `sample` and the reference take."""

import pytest
import torch

from quire_kernels.adjust_logits import SUPPRESSED
from quire_kernels.sample import sample
from quire_kernels.sample_greedy import sample_greedy, sample_greedy_reference
from sampling_rows import make_tensors
from worker_svc.step import SamplingParams


@pytest.mark.parametrize("vocab_size", [1, 97, 1024, 1025, 5001])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_the_largest_logit_is_taken_as_by_sample(vocab_size: int, rows: int, device: str) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # A step of 0.5 between logits: the largest one is there several times.
    logits = (torch.randn(rows, vocab_size + 3, generator=generator) * 4).round() / 2
    logits = logits[:, :vocab_size].to(device)
    before = logits.clone()
    found, expected = (torch.full((rows,), -7, dtype=torch.int64, device=device) for _ in range(2))
    sample_greedy(logits, found)
    sample_greedy_reference(logits, expected)
    assert found.tolist() == expected.tolist()
    assert found.tolist() == sample(logits, make_tensors([SamplingParams()] * rows, device)).tolist()
    assert torch.equal(logits, before)


def test_rows_without_a_token_get_none(device: str) -> None:
    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(1))
    logits[0, 1499] = float("nan")
    logits[1, 3] = float("inf")
    logits[2, 3] = float("-inf")
    logits[3] = SUPPRESSED.value
    logits[4] = SUPPRESSED.value
    logits[4, 1400] = -1e30
    logits = logits.to(device)
    found, expected = (torch.empty(6, dtype=torch.int64, device=device) for _ in range(2))
    sample_greedy(logits, found)
    sample_greedy_reference(logits, expected)
    assert found.tolist() == expected.tolist() == [-1, -1, -1, -1, 1400, int(logits[5].argmax())]


def test_no_rows_are_no_launch(device: str) -> None:
    sample_greedy(torch.empty(0, 7, device=device), torch.empty(0, dtype=torch.int64, device=device))


@pytest.mark.parametrize(
    ("logits", "out", "named"),
    [
        (torch.zeros(2, 7, dtype=torch.float16), torch.zeros(2, dtype=torch.int64), "logits"),
        (torch.zeros(2, 1 << 19), torch.zeros(2, dtype=torch.int64), "logits"),
        (torch.zeros(2, 7), torch.zeros(3, dtype=torch.int64), "out"),
        (torch.zeros(2, 7), torch.zeros(2, dtype=torch.int32), "out"),
    ],
)
def test_wrong_arguments_are_named(logits: torch.Tensor, out: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: must "):
        sample_greedy(logits, out)
