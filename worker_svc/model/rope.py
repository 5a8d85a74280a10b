"""Rotary position embedding (arXiv:2104.09864), in the half-split layout that the Llama family's checkpoints use."""

import math

import torch
from torch import Tensor

from worker_svc.model.description import ModelDescription, RopeConfig, RopeKind


def rope_of(description: ModelDescription) -> RopeConfig:
    """The rotary positions of all layers. Raises ValueError if they have none, or differ: see `support`."""
    ropes = {layer.attention.rope for layer in description.layers}
    rope = ropes.pop()
    if rope is None or ropes:
        raise ValueError("description: must have the same rotary positions in all layers")
    return rope


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
        case RopeKind.YARN:
            return _yarn_frequencies(frequencies, config, head_dim)


def _llama3_frequencies(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched, short ones kept, those in between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_context_length / wavelengths
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    stretched = torch.where(turns < config.low_freq_factor, frequencies / config.factor, frequencies)
    between = (turns >= config.low_freq_factor) & (turns <= config.high_freq_factor)
    return torch.where(between, blended, stretched)


def _yarn_frequencies(frequencies: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """YaRN's scaling (arXiv:2309.00071, section 3.2): as Llama 3.1's, blended along the dimensions."""

    def dimension(turns: float) -> float:
        """The pair of dimensions that turns so often within the original context."""
        wavelength = config.original_context_length / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / config.factor * stretched + frequencies * (1 - stretched)


class Rotation:
    """The angles of one step's tokens, for the queries and keys of every layer."""

    def __init__(
        self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype, attention_factor: float = 1.0
    ) -> None:
        """`positions` int64 [num_tokens], `frequencies` float32 [head_dim / 2]; rotated vectors are multiplied by
        `factor`.
        """
        angles = (positions[:, None].float() * frequencies)[:, None, :]
        cosine, sine = angles.cos() * attention_factor, angles.sin() * attention_factor
        # [num_tokens, 1, head_dim]: the halves of a head swap places under the sine, the first with its sign changed.
        self._cosine = torch.cat((cosine, cosine), -1).to(dtype)
        self._sine = torch.cat((-sine, sine), -1).to(dtype)
        self._half = frequencies.shape[0]

    def __call__(self, heads: Tensor) -> Tensor:
        """`heads` [num_tokens, num_heads, head_dim], rotated; a new tensor."""
        return (heads * self._cosine).addcmul_(heads.roll(self._half, -1), self._sine)
