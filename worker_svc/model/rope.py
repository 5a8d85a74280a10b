"""Rotary position embedding (arXiv:2104.09864), in the half-split layout that the Llama family's checkpoints use."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from worker_svc.model.description import ModelDescription, RopeConfig, RopeKind


class HeadRope(NamedTuple):
    """The rotary positions of heads."""

    config: RopeConfig
    head_dim: int

    def frequencies(self) -> Tensor:
        """`inverse_frequencies` of these heads."""
        return inverse_frequencies(self.config, self.head_dim)


@dataclass(frozen=True, slots=True)
class LayerRopes:
    """The distinct rotary positions of a model, and which of them each layer has."""

    distinct: tuple[HeadRope, ...]
    """In the order in which layers first have them; empty if no layer has any."""
    of_layers: tuple[int | None, ...]
    """For each layer the index into `distinct`; None: the layer has no rotary positions."""


def layer_ropes(description: ModelDescription) -> LayerRopes:
    """The rotary positions of a model: a backend computes frequencies and angles once for each distinct one."""
    attentions = [layer.attention for layer in description.layers]
    ropes = [None if each.rope is None else HeadRope(each.rope, each.head_dim) for each in attentions]
    distinct = tuple(dict.fromkeys(rope for rope in ropes if rope is not None))
    return LayerRopes(distinct, tuple(None if rope is None else distinct.index(rope) for rope in ropes))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of rotated dimensions, as transformers computes them: float32
    [rotated / 2], where `rotated` is `config.rotated_dims`, or `head_dim`. The first `rotated` dimensions of a head
    form the pairs (i, i + rotated / 2); the others stay.
    """
    rotated = head_dim if config.rotated_dims is None else config.rotated_dims
    wavelengths = config.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    if config.kind is RopeKind.LONGROPE:
        return 1.0 / (torch.tensor(config.pair_factors, dtype=torch.float32) * wavelengths)
    frequencies = 1.0 / wavelengths
    match config.kind:
        case RopeKind.DEFAULT:
            return frequencies
        case RopeKind.LINEAR:
            return frequencies / config.factor
        case RopeKind.LLAMA3:
            return _llama3_frequencies(frequencies, config)
        case RopeKind.YARN:
            return _yarn_frequencies(frequencies, config, rotated)
        case RopeKind.PROPORTIONAL:
            num_turned = int(config.turned_share * rotated // 2)
            return frequencies.where(torch.arange(len(frequencies)) < num_turned, 0.0) / config.factor


def _llama3_frequencies(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched, short ones kept, those in between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_context_length / wavelengths
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    stretched = torch.where(turns < config.low_freq_factor, frequencies / config.factor, frequencies)
    between = (turns >= config.low_freq_factor) & (turns <= config.high_freq_factor)
    return torch.where(between, blended, stretched)


def _yarn_frequencies(frequencies: Tensor, config: RopeConfig, num_dims: int) -> Tensor:
    """YaRN's scaling (arXiv:2309.00071, section 3.2): as Llama 3.1's, blended along the dimensions."""

    def dimension(turns: float) -> float:
        """The pair of dimensions that turns so often within the original context."""
        wavelength = config.original_context_length / (turns * 2 * math.pi)
        return num_dims * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_dims - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(num_dims // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / config.factor * stretched + frequencies * (1 - stretched)


def query_factors(config: RopeConfig, positions: Tensor) -> Tensor | None:
    """What queries at `positions` [num_tokens] are multiplied by after their rotation: float32 [num_tokens]; None: they
    stay.
    """
    if not config.query_beta:
        return None
    return 1 + config.query_beta * torch.log(1 + torch.floor(positions / config.original_context_length))


def query_factors_of_context(config: RopeConfig, context_length: int) -> Tensor | None:
    """The same at each position of a context, float32 [context_length]. It may be long: nothing is made of it where
    queries stay.
    """
    return query_factors(config, torch.arange(context_length)) if config.query_beta else None


class Rotation:
    """The angles of one step's tokens, for the queries and keys of the layers that have these rotary positions."""

    def __init__(
        self,
        positions: Tensor,
        frequencies: Tensor,
        dtype: torch.dtype,
        attention_factor: float = 1.0,
        query_factors: Tensor | None = None,
    ) -> None:
        """`positions` int64 [num_tokens], `frequencies` float32 [rotated / 2]; what is rotated is multiplied by
        `attention_factor`, and queries afterwards by `query_factors` float32 [num_tokens], if there are any.
        """
        angles = (positions[:, None].float() * frequencies)[:, None, :]
        cosine, sine = angles.cos() * attention_factor, angles.sin() * attention_factor
        # [num_tokens, 1, rotated]: the halves swap places under the sine, the first with its sign changed.
        self._cosine = torch.cat((cosine, cosine), -1).to(dtype)
        self._sine = torch.cat((-sine, sine), -1).to(dtype)
        self._half = frequencies.shape[0]
        self._query_factors = None if query_factors is None else query_factors[:, None, None].to(dtype)

    def __call__(self, heads: Tensor) -> Tensor:
        """`heads` [num_tokens, num_heads, head_dim], of which the first `rotated` dimensions are rotated; a new
        tensor.
        """
        first, rest = heads[..., : 2 * self._half], heads[..., 2 * self._half :]
        rotated = (first * self._cosine).addcmul_(first.roll(self._half, -1), self._sine)
        return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated

    def scale_queries(self, queries: Tensor) -> Tensor:
        """Rotated queries [num_tokens, num_heads, head_dim] times their factors."""
        return queries if self._query_factors is None else queries * self._query_factors
