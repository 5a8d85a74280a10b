"""The order of queries, keys and values in the compiled code, written from its definition."""

import torch
from torch import Tensor


def joined_heads(parts: list[Tensor], head_dim: int) -> Tensor:
    """Tensors [outputs, ...] of queries, keys and values as DecoderModel::has_paired_halves has them: of each head
    sixteen outputs of its first half, then the same of its second half, and so on.
    """
    joined = torch.cat(parts)
    first = torch.arange(0, len(joined), head_dim)[:, None, None] + torch.arange(0, head_dim // 2, 16)[:, None]
    panels = torch.stack([first, first + head_dim // 2], 2) + torch.arange(16)
    return joined[panels.flatten()]
