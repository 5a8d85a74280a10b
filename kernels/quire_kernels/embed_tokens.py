"""Embeddings of a step's tokens, including those that the step before has just sampled, and of their positions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import ceil_div, check_vector, next_power_of_2

_MAX_TILE = 4096


@triton.jit
def known_token(p_token_ids, p_sampled, token):  # type: ignore[no-untyped-def]
    """The id of a token of the step."""
    token_id = tl.load(p_token_ids + token)
    if token_id < 0:
        # -1 where no token was sampled: the result is not used, but the lookup must be in bounds.
        token_id = tl.maximum(tl.load(p_sampled + (-1 - token_id)), 0)
    return token_id


@triton.jit  # type: ignore[untyped-decorator]
def _embed_tokens_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_token_ids,
    p_sampled,
    p_embedding,
    p_positions,
    p_position_embedding,
    scale,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    token_id = known_token(p_token_ids, p_sampled, token)
    o_column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_column = o_column < WIDTH
    # [TILE]
    b_values = tl.load(p_embedding + token_id * WIDTH + o_column, mask=m_column, other=0.0).to(tl.float32)
    if scale is not None:
        b_values *= scale
    if p_position_embedding is not None:
        p_place = p_position_embedding + tl.load(p_positions + token) * WIDTH
        b_values += tl.load(p_place + o_column, mask=m_column, other=0.0).to(tl.float32)
    tl.store(p_output + token * WIDTH + o_column, b_values, mask=m_column)


def embed_tokens(
    token_ids: Tensor,
    sampled: Tensor,
    embedding: Tensor,
    *,
    scale: float | None = None,
    positions: Tensor | None = None,
    position_embedding: Tensor | None = None,
) -> Tensor:
    """The embeddings of tokens, in float32, times `scale`, and those of their positions added.

    Args:
        token_ids: int64 [num_tokens], contiguous; -1 - row is the token at that row of `sampled`.
        sampled: int64 [rows], contiguous; -1 where there is no token, which counts as token 0.
        embedding: [vocab_size, width], contiguous.
        scale: None: 1.
        positions: int64 [num_tokens], contiguous, each below max_positions; only used with `position_embedding`.
        position_embedding: [max_positions, width], contiguous; None: nothing is added.

    Returns:
        float32 [num_tokens, width], contiguous.

    Raises:
        ValueError: `positions` or `position_embedding` have a wrong shape, dtype, stride or device.
    """
    _check(token_ids, embedding, positions, position_embedding)
    num_tokens, width = len(token_ids), embedding.shape[1]
    output = torch.empty((num_tokens, width), dtype=torch.float32, device=embedding.device)
    if num_tokens:
        tile = min(_MAX_TILE, next_power_of_2(width))
        _embed_tokens_kernel[(num_tokens, ceil_div(width, tile))](
            output,
            token_ids,
            sampled,
            embedding,
            None if position_embedding is None else positions,
            position_embedding,
            scale,
            WIDTH=width,
            TILE=tile,
            num_warps=4,
        )
    return output


def embed_tokens_reference(
    token_ids: Tensor,
    sampled: Tensor,
    embedding: Tensor,
    *,
    scale: float | None = None,
    positions: Tensor | None = None,
    position_embedding: Tensor | None = None,
) -> Tensor:
    """What `embed_tokens` does, in plain torch."""
    _check(token_ids, embedding, positions, position_embedding)
    embedded = embedding[known_tokens_by_torch(token_ids, sampled)].float()
    if scale is not None:
        embedded *= scale
    if positions is not None and position_embedding is not None:
        embedded += position_embedding[positions]
    return embedded


def known_tokens_by_torch(token_ids: Tensor, sampled: Tensor) -> Tensor:
    """The ids of a step's tokens, int64 [num_tokens]."""
    places = token_ids.bitwise_not().clamp(min=0)
    return torch.where(token_ids < 0, sampled[places], token_ids).clamp(min=0)


def _check(token_ids: Tensor, embedding: Tensor, positions: Tensor | None, position_embedding: Tensor | None) -> None:
    if position_embedding is None:
        return
    require(position_embedding.ndim == 2, "position_embedding", "be [max_positions, width]")
    require(position_embedding.shape[1] == embedding.shape[1], "position_embedding", "have the width of embedding")
    require(position_embedding.is_contiguous(), "position_embedding", "be contiguous")
    require(position_embedding.device == embedding.device, "position_embedding", f"be on {embedding.device}")
    if positions is None:
        raise ValueError("positions: must come with position_embedding")
    check_vector(positions, "positions", len(token_ids), torch.int64, embedding.device)
