"""Rotary positions of encoders, by torch's operators."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.encoder_weights import token_positions
from worker_svc.model.rope import Rotation, inverse_frequencies

Rotate: TypeAlias = Callable[[Tensor], Tensor]
"""Queries, keys and values of tokens side by side [num_tokens, 3 * hidden_size], with queries and keys rotated."""


class EncoderRotation:
    """Rotates the queries and keys of prompts. Where positions are learnt, they stay."""

    def __init__(self, description: EncoderDescription, dtype: torch.dtype, device: torch.device) -> None:
        rope, self._num_heads = description.rope, description.num_heads
        self._dtype, self._device = dtype, device
        self._factor = 1.0 if rope is None else rope.attention_factor
        self._frequencies = None if rope is None else inverse_frequencies(rope, description.head_dim).to(device)

    def of_prompts(self, lengths: Sequence[int]) -> Rotate:
        """For the tokens of prompts of these lengths."""
        if self._frequencies is None:
            return lambda qkv: qkv
        positions = token_positions(lengths).to(self._device)
        rotation = Rotation(positions, self._frequencies, self._dtype, self._factor)

        def rotate(qkv: Tensor) -> Tensor:
            heads = qkv.view(len(qkv), 3 * self._num_heads, -1)
            rotated = rotation(heads[:, : 2 * self._num_heads])
            return torch.cat((rotated, heads[:, 2 * self._num_heads :]), 1).view(qkv.shape)

        return rotate
