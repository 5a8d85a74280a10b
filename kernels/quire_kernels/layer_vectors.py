"""The vectors of a step's tokens that each layer of a model has beside the hidden states: an embedding, and what is
projected of the hidden states, after its norm. Gemma 3n and 4 call them per-layer embeddings.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import ceil_div, check_rows, check_vector
from quire_kernels.embed_tokens import known_token, known_tokens_by_torch
from quire_kernels.row_norm import RowNorm, check_norm, norm_tile, normalize, row_norm_reference


@triton.jit  # type: ignore[untyped-decorator]
def _layer_vectors_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_token_ids,
    p_sampled,
    p_embedding,
    p_projected,
    p_weight,
    p_bias,
    epsilon,
    embedding_scale,
    scale,
    stride_projected,
    NUM_LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    token_id = known_token(p_token_ids, p_sampled, token)
    o_layer = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    o_column = tl.arange(0, TILE_WIDTH)
    m_column = o_column < WIDTH
    m_tile = (o_layer < NUM_LAYERS)[:, None] & m_column[None, :]
    # [TILE_ROWS, TILE_WIDTH]
    o_tile = o_layer[:, None] * WIDTH + o_column[None, :]
    b_projected = tl.load(p_projected + token * stride_projected + o_tile, mask=m_tile, other=0.0).to(tl.float32)
    b_normed = normalize(b_projected, p_weight, p_bias, epsilon, o_column, m_column, WIDTH, CENTERED)
    p_embedded = p_embedding + token_id * (NUM_LAYERS * WIDTH) + o_tile
    b_embedded = tl.load(p_embedded, mask=m_tile, other=0.0).to(tl.float32)
    b_output = (b_embedded * embedding_scale + b_normed) * scale
    p_vectors = p_output + token * (NUM_LAYERS * WIDTH) + o_tile
    tl.store(p_vectors, b_output.to(p_output.dtype.element_ty), mask=m_tile)


def layer_vectors(
    token_ids: Tensor,
    sampled: Tensor,
    embedding: Tensor,
    projected: Tensor,
    norm: RowNorm,
    *,
    embedding_scale: float,
    scale: float,
) -> Tensor:
    """(embedding * embedding_scale + norm(projected)) * scale for each token and layer, computed in float32 and rounded
    once.

    Args:
        token_ids: int64 [num_tokens], contiguous; -1 - row is the token at that row of `sampled`.
        sampled: int64 [rows], contiguous; -1 where there is no token, which counts as token 0.
        embedding: [vocab_size, num_layers * width], contiguous.
        projected: [num_tokens, num_layers * width], last dimension contiguous.
        norm: of each layer's part of `projected`; its weight and bias are [width] and contiguous.

    Returns:
        [num_tokens, num_layers, width], contiguous, of the dtype of `embedding`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    num_layers, width = _check(token_ids, embedding, projected, norm)
    output = torch.empty((len(token_ids), num_layers, width), dtype=embedding.dtype, device=embedding.device)
    if not len(token_ids):
        return output
    tile = norm_tile(width)
    _layer_vectors_kernel[(len(token_ids), ceil_div(num_layers, tile["TILE_ROWS"]))](
        output,
        token_ids,
        sampled,
        embedding,
        projected,
        norm.weight,
        norm.bias,
        norm.epsilon,
        embedding_scale,
        scale,
        projected.stride(0),
        NUM_LAYERS=num_layers,
        WIDTH=width,
        CENTERED=norm.is_centered,
        **tile,
    )
    return output


def layer_vectors_reference(
    token_ids: Tensor,
    sampled: Tensor,
    embedding: Tensor,
    projected: Tensor,
    norm: RowNorm,
    *,
    embedding_scale: float,
    scale: float,
) -> Tensor:
    """`layer_vectors` in plain torch."""
    num_layers, width = _check(token_ids, embedding, projected, norm)
    shape = len(token_ids), num_layers, width
    embedded = embedding[known_tokens_by_torch(token_ids, sampled)].float().view(shape) * embedding_scale
    normed = row_norm_reference(projected.reshape(shape), norm, torch.float32)
    return ((embedded + normed) * scale).to(embedding.dtype)


def _check(token_ids: Tensor, embedding: Tensor, projected: Tensor, norm: RowNorm) -> tuple[int, int]:
    """The number of layers and the width of each, if all is well."""
    check_rows(embedding, "embedding")
    require(embedding.is_contiguous(), "embedding", "be contiguous")
    check_rows(projected, "projected")
    check_vector(token_ids, "token_ids", len(projected), torch.int64, embedding.device)
    require(projected.shape[1] == embedding.shape[1], "projected", "have the width of embedding")
    require(projected.device == embedding.device, "projected", "be on the device of embedding")
    require(norm.weight.ndim == 1 and len(norm.weight) > 0, "norm.weight", "be [width]")
    num_layers, rest = divmod(embedding.shape[1], len(norm.weight))
    require(num_layers >= 1 and rest == 0, "norm.weight", "have a width that divides that of embedding")
    check_norm(norm, "norm", projected[:, : len(norm.weight)])
    return num_layers, len(norm.weight)
