"""Embeddings of known tokens, and of tokens that the previous step has sampled."""

import pytest
import torch

from quire_kernels.embed_tokens import embed_tokens, embed_tokens_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [1, 48, 4097])
def test_known_and_sampled_tokens_are_looked_up(dtype: torch.dtype, width: int, device: torch.device) -> None:
    embedding = torch.randn(11, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    sampled = torch.tensor([7, 0, 10], device=device)
    token_ids = torch.tensor([0, -1, 10, -3, -2, 4], device=device)
    expected = embedding[[0, 7, 10, 10, 0, 4]].float()
    assert torch.equal(embed_tokens(token_ids, sampled, embedding), expected)
    assert torch.equal(embed_tokens_reference(token_ids, sampled, embedding), expected)


def test_a_missing_token_is_looked_up_in_bounds(device: torch.device) -> None:
    embedding = torch.arange(6.0, device=device).view(3, 2)
    sampled, token_ids = torch.tensor([-1], device=device), torch.tensor([-1, 2], device=device)
    assert embed_tokens(token_ids, sampled, embedding).tolist() == [[0.0, 1.0], [4.0, 5.0]]
    assert embed_tokens_reference(token_ids, sampled, embedding).tolist() == [[0.0, 1.0], [4.0, 5.0]]


def test_no_tokens(device: torch.device) -> None:
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    assert embed_tokens(nothing, nothing, torch.ones(3, 2, device=device)).shape == (0, 2)
