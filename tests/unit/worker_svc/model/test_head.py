"""In 16 bits, the argmax is that of float32."""

import pytest
import torch

from worker_svc.model.head import Head


def _hidden_and_weight(vocab_size: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab_size, 64, generator=generator)
    # Pairs of tokens that are alike but for little.
    weight[1::2] = weight[:-1:2] * (1 + 0.004 * torch.randn(len(weight[1::2]), 1, generator=generator))
    return torch.randn(rows, 64, generator=generator).bfloat16(), weight.bfloat16()


@pytest.mark.parametrize("vocab_size", [192, 194, 257])
def test_the_best_of_near_ties_is_that_of_float32(vocab_size: int) -> None:
    hidden, weight = _hidden_and_weight(vocab_size, 300)
    exact = hidden.float() @ weight.float().T
    rounded = exact.bfloat16()
    assert (rounded.argmax(-1) != exact.argmax(-1)).any()  # what rounding alone gets wrong
    logits = Head(weight)(hidden)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))
    assert torch.allclose(logits, exact, rtol=2.0**-7, atol=1e-3)


def test_a_row_without_a_clear_best_score_keeps_what_the_product_gave() -> None:
    hidden, weight = _hidden_and_weight(192, 2)
    flat = weight[:1].repeat(192, 1)
    logits = Head(flat)(hidden)
    assert (logits == logits[:, :1]).all()


def test_scores_of_float32_are_the_product() -> None:
    hidden, weight = (part.float() for part in _hidden_and_weight(192, 5))
    assert torch.allclose(Head(weight)(hidden), hidden @ weight.T, atol=1e-4)


def test_logits_that_are_no_numbers_stay_so() -> None:
    hidden, weight = _hidden_and_weight(192, 3)
    hidden[1, 7] = float("nan")
    finite = Head(weight)(hidden).isfinite()
    assert finite.all(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_with_a_bias_the_best_of_near_ties_is_that_of_float32(scale: float) -> None:
    hidden, weight = _hidden_and_weight(256, 300)
    # A bias that cancels what all rows have in common leaves sums that are small beside their products.
    common = hidden.float().mean(0)
    hidden = (hidden.float() + scale * common).bfloat16()
    bias = -(scale * weight.float() @ common)
    exact = hidden.float() @ weight.float().T + bias
    logits = Head(weight, bias)(hidden)
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))
    float32 = Head(weight.float(), bias)(hidden.float())
    assert torch.allclose(float32, exact, atol=1e-3)
