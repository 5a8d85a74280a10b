"""Rotary position embedding (arXiv:2104.09864), in the half-split layout that the Llama family's checkpoints use."""

import math

import torch
from torch import Tensor

from worker_svc.model.config import RopeConfig, RopeKind


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [head_dim / 2], as transformers computes them."""
    frequencies = 1.0 / (config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match config.kind:
        case RopeKind.DEFAULT:
            return frequencies
        case RopeKind.LINEAR:
            return frequencies / config.factor
        case RopeKind.LLAMA3:
            return _llama3_frequencies(frequencies, config)


def _llama3_frequencies(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched, short ones stay, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_context_length / wavelengths
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    stretched = torch.where(turns < config.low_freq_factor, frequencies / config.factor, frequencies)
    between = (turns >= config.low_freq_factor) & (turns <= config.high_freq_factor)
    return torch.where(between, blended, stretched)


class Rotation:
    """The angles of one step's tokens, ready to turn queries and keys of every layer."""

    def __init__(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> None:
        """`positions` int64 [num_tokens], `frequencies` float32 [head_dim / 2]."""
        angles = (positions[:, None].float() * frequencies)[:, None, :]
        cosine, sine = angles.cos(), angles.sin()
        # [num_tokens, 1, head_dim]: the halves of a head swap places under the sine, the first with its sign changed.
        self._cosine = torch.cat((cosine, cosine), -1).to(dtype)
        self._sine = torch.cat((-sine, sine), -1).to(dtype)
        self._half = frequencies.shape[0]

    def __call__(self, heads: Tensor) -> Tensor:
        """`heads` [num_tokens, num_heads, head_dim], turned; a new tensor."""
        return (heads * self._cosine).addcmul_(heads.roll(self._half, -1), self._sine)
