"""Multi-head latent attention by torch's operators (arXiv:2405.04434, section 2.1).

The cache holds a latent vector and a rotated key of each token, which all heads share. The product that makes keys of
latent vectors is computed with the queries, and the one that makes values with what attention returns: so attention has
one KV head, whose values are its keys.
"""

import torch
from torch import Tensor

from worker_svc.attention import StepAttention
from worker_svc.model.rope import Rotation
from worker_svc.model.torch_layers import TorchLayer


def attend_latent(
    number: int, layer: TorchLayer, inputs: Tensor, rotation: Rotation | None, attention: StepAttention
) -> Tensor:
    """The values of all heads [num_tokens, num_heads * value_dim] for `inputs` [num_tokens, hidden] of a layer with
    latent attention, before the output product.
    """
    latent, num_heads = layer.latent, layer.spec.attention.num_heads
    assert latent is not None
    assert rotation is not None
    spec = latent.spec
    queries, compressed = torch.split(layer.qkv(inputs), list(layer.spec.attention.qkv.outputs), -1)
    if latent.query_norm is not None and latent.query_up is not None:
        queries = latent.query_up(latent.query_norm(queries))
    heads = queries.reshape(len(inputs), num_heads, -1)
    plain, unrotated = heads[..., : spec.plain_dim], heads[..., spec.plain_dim :]
    # The key is one more head beside the queries.
    rotated = torch.cat((unrotated, compressed[:, None, spec.rank :]), 1)
    if spec.rotates_neighbours:
        # The same order of dimensions in queries and keys changes no score.
        rotated = rotated.view(*rotated.shape[:2], -1, 2).transpose(-1, -2).flatten(-2)
    rotated = rotation(rotated)
    key_up, value_up = torch.split(latent.kv_up, [spec.plain_dim, spec.value_dim], 1)
    query = torch.cat((_per_head(plain, key_up), rotated[:, :num_heads]), -1)
    key = torch.cat((latent.kv_norm(compressed[:, : spec.rank])[:, None], rotated[:, num_heads:]), -1)
    gathered = attention(number, query, key, key)[..., : spec.rank]
    return _per_head(gathered, value_up.transpose(1, 2)).flatten(1)


def _per_head(heads: Tensor, weights: Tensor) -> Tensor:
    """[num_tokens, num_heads, n] times each head's weight [num_heads, n, m]: [num_tokens, num_heads, m]."""
    return torch.bmm(heads.transpose(0, 1), weights).transpose(0, 1)
