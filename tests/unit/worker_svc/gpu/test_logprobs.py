"""Log-probabilities and top tokens, computed on the device."""

import torch

from worker_svc.gpu.logprobs import prepare_logprobs


def test_top_tokens_are_in_order_and_equal_ones_by_token_id(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, -2.0, 1.0, -2.0], [-1.0, -1.0, -3.0, -1.0, 0.5]], device=device)
    values, ids = prepare_logprobs(logits, 5).complete(torch.tensor([2, 0], device=device))
    assert ids.tolist() == [[1, 3, 0, 2, 4], [4, 0, 1, 3, 2]]
    expected = logits.log_softmax(-1)
    assert torch.allclose(values[:, 0], expected[[0, 1], [2, 0]], atol=1e-6)
    assert torch.allclose(values[:, 1:], expected.gather(-1, ids.long()), atol=1e-6)


def test_neither_other_rows_nor_how_many_are_asked_for_change_a_row(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 5003, device=device) * 4
    logits[:, 100:140] = 30.0
    tokens = torch.arange(7, device=device) * 700
    values, ids = prepare_logprobs(logits, 20).complete(tokens)
    for row, count in enumerate((0, 1, 2, 5, 19, 20, 20)):
        alone, which = prepare_logprobs(logits[row : row + 1], count).complete(tokens[row : row + 1])
        assert torch.equal(alone[0], values[row, : 1 + count])
        assert torch.equal(which[0], ids[row, :count])
