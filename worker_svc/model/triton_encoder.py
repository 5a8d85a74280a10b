"""An encoder on a GPU: between two matrix products there is one Triton kernel. torch's operators compute rotary
positions.

Products are torch's, in the model's dtype, or Quire's own in deterministic mode. The hidden state between layers is
float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire_kernels.activation import Activation, gated_activation, plain_activation
from quire_kernels.embed_tokens import embed_tokens
from quire_kernels.invariant_linear import invariant_linear
from quire_kernels.post_norm import post_norm
from quire_kernels.prompt_attention import prompt_attention, unsupported_prompt_heads
from quire_kernels.row_norm import RowNorm
from worker_svc.errors import UnsupportedModel
from worker_svc.model.description import LinearLayer, MlpKind
from worker_svc.model.encoder_description import EncoderDescription, EncoderLayer, LayerNorm
from worker_svc.model.encoder_rotation import EncoderRotation
from worker_svc.model.encoder_weights import open_encoder, take_embeddings, token_places
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.weights import Checkpoint
from worker_svc.wanted_states import Places, wanted_states


def unsupported_reason(description: EncoderDescription) -> str | None:
    """Why the Triton kernels do not compute an encoder; None: they do."""
    if description.relative_positions is not None:
        return "a relative position bias"
    return unsupported_prompt_heads(description.head_dim)


@dataclass(frozen=True, slots=True, eq=False)
class _EncoderProduct:
    """A linear map [num_tokens, inputs] to [num_tokens, outputs]."""

    weight: Tensor
    bias: Tensor | None
    deterministic: bool

    def __call__(self, inputs: Tensor) -> Tensor:
        multiply = invariant_linear if self.deterministic else F.linear
        return multiply(inputs, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class _TritonEncoderLayer:
    qkv: _EncoderProduct
    output: _EncoderProduct
    attention_norm: RowNorm
    gate_up: _EncoderProduct
    activate: Callable[[Tensor], Tensor]
    down: _EncoderProduct
    mlp_norm: RowNorm


class TritonEncoder:
    """An encoder's weights on its device. For one thread. With `deterministic`, a prompt's bits do not depend on the
    other prompts of its call.
    """

    def __init__(self, description: EncoderDescription, checkpoint: Checkpoint, *, deterministic: bool = False) -> None:
        """Raises UnsupportedModel if the description is not supported, or tensors do not match it."""
        refused = unsupported_reason(description)
        if refused is not None:
            raise UnsupportedModel(f"the Triton kernels do not compute {refused}")
        self.description = description
        self.device, self.dtype = checkpoint.device, checkpoint.dtype
        self._deterministic = deterministic
        embeddings = take_embeddings(description, checkpoint)
        self._words, self._positions = embeddings.words, embeddings.of_places(torch.float32)
        self._norm = _norm(description.embedding_norm, checkpoint)
        self._rotation = EncoderRotation(description, self.dtype, self.device)
        self._layers = [self._build(layer, checkpoint) for layer in description.layers]

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None, places: Places = None
    ) -> list[Tensor]:
        """The last hidden states of each prompt, float32 [num_tokens, hidden_size]. No prompt is empty. `num_first` is
        how many tokens of each prompt are of the first type, at least one; None: all. Only the states that `places`
        want are returned.
        """
        lengths = [len(prompt) for prompt in prompts]
        tokens = self._upload([token_id for prompt in prompts for token_id in prompt], torch.long)
        position_rows = token_places(lengths, num_first, self.description.num_positions)
        starts = self._upload([0, *accumulate(lengths)], torch.int32)
        # No token is one that was just sampled.
        hidden = embed_tokens(
            tokens, tokens, self._words, positions=position_rows.to(self.device), position_embedding=self._positions
        )
        rotate = self._rotation.of_prompts(lengths)
        normed = post_norm(hidden, None, self._norm, self.dtype)
        for layer in self._layers:
            attended = prompt_attention(rotate(layer.qkv(normed)), starts, self.description.num_heads)
            normed = post_norm(hidden, layer.output(attended), layer.attention_norm, self.dtype)
            active = layer.activate(layer.gate_up(normed))
            normed = post_norm(hidden, layer.down(active), layer.mlp_norm, self.dtype)
        return wanted_states(torch.split(hidden, lengths), places)

    def _upload(self, numbers: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(self.device)

    def _build(self, layer: EncoderLayer, checkpoint: Checkpoint) -> _TritonEncoderLayer:
        def product(spec: LinearLayer) -> _EncoderProduct:
            return _EncoderProduct(*LinearWeights(spec, checkpoint).fused(), self._deterministic)

        activate = gated_activation if layer.mlp.kind is MlpKind.GATED else plain_activation
        return _TritonEncoderLayer(
            product(layer.qkv),
            product(layer.output),
            _norm(layer.attention_norm, checkpoint),
            product(layer.mlp.gate_up),
            partial(activate, activation=Activation(layer.mlp.activation.value)),
            product(layer.mlp.down),
            _norm(layer.mlp_norm, checkpoint),
        )


def _norm(spec: LayerNorm, checkpoint: Checkpoint) -> RowNorm:
    weight, bias = (checkpoint.take(f"{spec.name}.{part}", spec.size) for part in ("weight", "bias"))
    return RowNorm(weight, spec.eps, bias, is_centered=True)


def load_triton_encoder(
    description: EncoderDescription,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> TritonEncoder:
    """Loads the encoder of a directory. Raises UnsupportedModel if it is not supported, or its tensors do not match."""
    with open_encoder(description, directory, dtype, device) as checkpoint:
        return TritonEncoder(description, checkpoint, deterministic=deterministic)
