"""Embeddings of known tokens, of tokens that the previous step has sampled, and of positions."""

from typing import Any

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


@pytest.mark.parametrize("scale", [None, 7.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [1, 48, 4097])
def test_embeddings_are_scaled_and_those_of_positions_added(
    scale: float | None, dtype: torch.dtype, width: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding, places = (torch.randn(rows, width, generator=generator).to(device, dtype) for rows in (11, 6))
    sampled, token_ids = torch.tensor([7, 0], device=device), torch.tensor([0, -1, 10, -2], device=device)
    positions = torch.tensor([5, 0, 3, 5], device=device)
    expected = embedding[[0, 7, 10, 0]].float() * (1.0 if scale is None else scale)
    torch.testing.assert_close(embed_tokens(token_ids, sampled, embedding, scale=scale), expected)
    options: dict[str, Any] = {"scale": scale, "positions": positions, "position_embedding": places}
    actual = embed_tokens(token_ids, sampled, embedding, **options)
    torch.testing.assert_close(actual, expected + places[[5, 0, 3, 5]])
    torch.testing.assert_close(embed_tokens_reference(token_ids, sampled, embedding, **options), actual)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("positions", None),
        ("positions", torch.zeros(3, dtype=torch.int64)),
        ("positions", torch.zeros(2, dtype=torch.int32)),
        ("position_embedding", torch.zeros(5)),
        ("position_embedding", torch.zeros(5, 3)),
        ("position_embedding", torch.zeros(2, 5).T),
    ],
)
def test_a_wrong_argument_is_named(argument: str, value: Any) -> None:
    tokens = torch.zeros(2, dtype=torch.int64)
    options: dict[str, Any] = {"positions": tokens, "position_embedding": torch.zeros(5, 2)}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        embed_tokens(tokens, tokens, torch.zeros(4, 2), **options | {argument: value})


def test_no_tokens(device: torch.device) -> None:
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    assert embed_tokens(nothing, nothing, torch.ones(3, 2, device=device)).shape == (0, 2)
