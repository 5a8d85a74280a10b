"""An encoder by torch's operators, on a CPU or a GPU: many prompts at once, most of them without padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.model.building import BuiltMlp
from worker_svc.model.description import LinearLayer
from worker_svc.model.encoder_description import EncoderDescription, EncoderLayer, LayerNorm
from worker_svc.model.encoder_rotation import EncoderRotation
from worker_svc.model.encoder_weights import open_encoder, take_distance_scores, take_embeddings, token_places
from worker_svc.model.linear import Linear, make_linear
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.prompt_groups import PromptGroup, prompt_groups
from worker_svc.model.torch_mlp import TorchMlp, activated
from worker_svc.model.weights import Checkpoint
from worker_svc.wanted_states import Places, wanted_states


class _Norm:
    """A layer norm."""

    def __init__(self, spec: LayerNorm, checkpoint: Checkpoint) -> None:
        self._weight = checkpoint.take(f"{spec.name}.weight", spec.size)
        self._bias = checkpoint.take(f"{spec.name}.bias", spec.size)
        self._eps = spec.eps

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, (hidden.shape[-1],), self._weight, self._bias, self._eps)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    qkv: Linear
    output: Linear
    attention_norm: _Norm
    mlp: TorchMlp
    mlp_norm: _Norm


class TorchEncoder:
    """An encoder's weights. For one thread."""

    def __init__(self, description: EncoderDescription, checkpoint: Checkpoint) -> None:
        """Raises UnsupportedModel if tensors do not match the description."""
        self.description = description
        self.device, self.dtype = checkpoint.device, checkpoint.dtype
        embeddings = take_embeddings(description, checkpoint)
        self._words, self._positions = embeddings.words, embeddings.of_places(self.dtype)
        self._norm = _Norm(description.embedding_norm, checkpoint)
        self._layers = [_build(layer, checkpoint) for layer in description.layers]
        self._rotation = EncoderRotation(description, self.dtype, self.device)
        relative, self._distance_scores = description.relative_positions, None
        if relative is not None:
            sizes = description.num_heads, description.context_length
            self._distance_scores = take_distance_scores(relative, *sizes, checkpoint)

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None, places: Places = None
    ) -> list[Tensor]:
        """The last hidden states of each prompt [num_tokens, hidden_size]. No prompt is empty. So many tokens of each
        are of the first type, the others of the second; None: all are of the first. Only the states
        that `places` want are returned.
        """
        lengths = [len(prompt) for prompt in prompts]
        flat = [token_id for prompt in prompts for token_id in prompt]
        tokens = torch.tensor(flat, dtype=torch.long, device=self.device)
        position_rows = token_places(lengths, num_first, self.description.num_positions).to(self.device)
        rotate = self._rotation.of_prompts(lengths)
        groups = [(group, self._mask(group)) for group in prompt_groups(lengths, self.device)]
        hidden = self._norm(self._words[tokens] + self._positions[position_rows])
        for layer in self._layers:
            attended = self._attention(rotate(layer.qkv(hidden)), groups)
            hidden = layer.attention_norm(layer.output.add(attended, hidden))
            hidden = layer.mlp_norm(layer.mlp.down.add(activated(layer.mlp, hidden), hidden))
        return wanted_states(torch.split(hidden, lengths), places)

    def _mask(self, group: PromptGroup) -> Tensor | None:
        """What hides keys, or is added to scores, for a group's prompts, heads, queries and keys; None: nothing is."""
        if self._distance_scores is None:
            return group.mask
        places = torch.arange(group.rows.shape[1], device=self.device)
        own_place = self._distance_scores.shape[1] // 2
        scores = self._distance_scores[:, places[None] - places[:, None] + own_place]
        return scores[None] if group.mask is None else scores.where(group.mask, -torch.inf)

    def _attention(self, qkv: Tensor, groups: Sequence[tuple[PromptGroup, Tensor | None]]) -> Tensor:
        """The output [num_tokens, hidden_size] for queries, keys and values [num_tokens, 3 * hidden_size]. Groups come
        with their masks.
        """
        heads = self.description.num_heads
        output = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
        for group, mask in groups:
            count, longest = group.rows.shape
            queries, keys, values = qkv[group.rows].view(count, longest, 3, heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            flat = attended.transpose(1, 2).reshape(count * longest, -1)
            output[group.targets] = flat if group.sources is None else flat[group.sources]
        return output


def load_torch_encoder(
    description: EncoderDescription, directory: Path, dtype: torch.dtype, device: torch.device
) -> TorchEncoder:
    """Loads the encoder of a directory. Raises UnsupportedModel if its tensors do not match."""
    with open_encoder(description, directory, dtype, device) as checkpoint:
        return TorchEncoder(description, checkpoint)


def _build(layer: EncoderLayer, checkpoint: Checkpoint) -> _Layer:
    def linear(spec: LinearLayer) -> Linear:
        return make_linear(*LinearWeights(spec, checkpoint).fused())

    return _Layer(
        linear(layer.qkv),
        linear(layer.output),
        _Norm(layer.attention_norm, checkpoint),
        BuiltMlp(layer.mlp, linear(layer.mlp.gate_up), linear(layer.mlp.down)),
        _Norm(layer.mlp_norm, checkpoint),
    )
