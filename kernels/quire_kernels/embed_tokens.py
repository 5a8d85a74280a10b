"""Embeddings of a step's tokens, including those that the step before has just sampled."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_TILE = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _embed_tokens_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_token_ids,
    p_sampled,
    p_embedding,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    token_id = tl.load(p_token_ids + token)
    if token_id < 0:
        # -1 where no token was sampled: the result is not used, but the lookup must be in bounds.
        token_id = tl.maximum(tl.load(p_sampled + (-1 - token_id)), 0)
    o_column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_column = o_column < WIDTH
    # [TILE]
    b_values = tl.load(p_embedding + token_id * WIDTH + o_column, mask=m_column, other=0.0)
    tl.store(p_output + token * WIDTH + o_column, b_values.to(tl.float32), mask=m_column)


def embed_tokens(token_ids: Tensor, sampled: Tensor, embedding: Tensor) -> Tensor:
    """The embeddings of tokens, in float32.

    Args:
        token_ids: int64 [num_tokens], contiguous; -1 - row is the token at that row of `sampled`.
        sampled: int64 [rows], contiguous; -1 where there is no token, which counts as token 0.
        embedding: [vocab_size, width], contiguous.

    Returns:
        float32 [num_tokens, width], contiguous.
    """
    num_tokens, width = len(token_ids), embedding.shape[1]
    output = torch.empty((num_tokens, width), dtype=torch.float32, device=embedding.device)
    if num_tokens:
        tile = min(_MAX_TILE, triton.next_power_of_2(width))
        _embed_tokens_kernel[(num_tokens, triton.cdiv(width, tile))](
            output, token_ids, sampled, embedding, WIDTH=width, TILE=tile, num_warps=4
        )
    return output


def embed_tokens_reference(token_ids: Tensor, sampled: Tensor, embedding: Tensor) -> Tensor:
    """What `embed_tokens` does, in plain torch."""
    places = token_ids.bitwise_not().clamp(min=0)
    known = torch.where(token_ids < 0, sampled[places], token_ids).clamp(min=0)
    return embedding[known].float()
