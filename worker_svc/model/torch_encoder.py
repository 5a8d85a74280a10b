"""An encoder by torch's operators, on a CPU or a GPU: many prompts at once, most of them without padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.model.description import Activation, LinearLayer
from worker_svc.model.encoder_description import EncoderDescription, EncoderLayer, LayerNorm
from worker_svc.model.linear import Linear, make_linear
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.weight_format import format_of
from worker_svc.model.weights import Checkpoint

# Prompts share one call of the attention while at least this share of its keys are tokens.
_LEAST_FILLED = 0.75


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
    up: Linear
    down: Linear
    mlp_norm: _Norm


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Prompts whose attention is one call.

    `rows` [num_prompts, longest] are the tokens' rows in the batch; those beyond a prompt's end repeat its last token,
    and `mask` [num_prompts, 1, 1, longest] hides them; None: there are none. The results at the places `sources`
    [num_tokens], None for all, are those of the rows `targets`.
    """

    rows: Tensor
    mask: Tensor | None
    sources: Tensor | None
    targets: Tensor


class TorchEncoder:
    """An encoder's weights. For one thread."""

    def __init__(self, description: EncoderDescription, checkpoint: Checkpoint) -> None:
        """Raises UnsupportedModel if tensors do not match the description."""
        self.description = description
        self.device, self.dtype = checkpoint.device, checkpoint.dtype
        hidden = description.hidden_size
        self._words = checkpoint.take(description.word_embedding, description.vocab_size, hidden)
        positions = checkpoint.take(description.position_embedding, description.context_length, hidden)
        types = checkpoint.take(description.type_embedding, description.num_types, hidden)
        self._positions = positions + types[0]
        self._norm = _Norm(description.embedding_norm, checkpoint)
        self._layers = [_build(layer, description.activation, checkpoint) for layer in description.layers]

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The last hidden states of each prompt [num_tokens, hidden_size]. No prompt is empty."""
        lengths = [len(prompt) for prompt in prompts]
        flat = [token_id for prompt in prompts for token_id in prompt]
        tokens = torch.tensor(flat, dtype=torch.long, device=self.device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        groups = _groups(lengths, self.device)
        hidden = self._norm(self._words[tokens] + self._positions[positions])
        for layer in self._layers:
            hidden = layer.attention_norm(layer.output.add(self._attention(layer.qkv(hidden), groups), hidden))
            hidden = layer.mlp_norm(layer.down.add(layer.up(hidden), hidden))
        return list(torch.split(hidden, lengths))

    def _attention(self, qkv: Tensor, groups: Sequence[_Group]) -> Tensor:
        """The output [num_tokens, hidden_size] for queries, keys and values [num_tokens, 3 * hidden_size]."""
        heads = self.description.num_heads
        output = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
        for group in groups:
            count, longest = group.rows.shape
            queries, keys, values = qkv[group.rows].view(count, longest, 3, heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
            flat = attended.transpose(1, 2).reshape(count * longest, -1)
            output[group.targets] = flat if group.sources is None else flat[group.sources]
        return output


def load_torch_encoder(
    description: EncoderDescription, directory: Path, dtype: torch.dtype, device: torch.device
) -> TorchEncoder:
    """Loads the encoder of a directory. Raises UnsupportedModel if its tensors do not match."""
    with torch.inference_mode(), Checkpoint(directory, format_of(directory), dtype, device) as checkpoint:
        encoder = TorchEncoder(description, checkpoint)
        checkpoint.drop_prefixes(description.unused_prefixes)
        checkpoint.check_all_taken()
        return encoder


def _build(layer: EncoderLayer, activation: Activation, checkpoint: Checkpoint) -> _Layer:
    def linear(spec: LinearLayer, activation: Activation | None = None) -> Linear:
        return make_linear(*LinearWeights(spec, checkpoint).fused(), activation)

    qkv, output = linear(layer.qkv), linear(layer.output)
    up, down = linear(layer.up, activation), linear(layer.down)
    attention_norm, mlp_norm = (_Norm(norm, checkpoint) for norm in (layer.attention_norm, layer.mlp_norm))
    return _Layer(qkv, output, attention_norm, up, down, mlp_norm)


def _groups(lengths: Sequence[int], device: torch.device) -> list[_Group]:
    """Prompts of similar lengths together, the longest first."""
    starts = [0, *accumulate(lengths)]
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    num_tokens = 0
    for index in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and num_tokens + lengths[index] >= _LEAST_FILLED * longest * (len(groups[-1]) + 1):
            groups[-1].append(index)
            num_tokens += lengths[index]
        else:
            groups.append([index])
            num_tokens = lengths[index]
    return [_group([(starts[index], lengths[index]) for index in members], device) for members in groups]


def _group(members: Sequence[tuple[int, int]], device: torch.device) -> _Group:
    """A group of prompts, each with its first row and its length; the first one is the longest."""
    longest = members[0][1]
    columns = torch.arange(longest)
    first, lengths = (torch.tensor(column)[:, None] for column in zip(*members, strict=True))
    rows = first + columns.minimum(lengths - 1)
    is_token = columns < lengths
    targets = rows[is_token].to(device)
    if bool(is_token.all()):
        return _Group(rows.to(device), None, None, targets)
    sources = is_token.flatten().nonzero().flatten()
    return _Group(rows.to(device), is_token[:, None, None].to(device), sources.to(device), targets)
