"""A random decoder of two layers, computed by torch in float64: what the compiled forward pass is compared with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, relu, rms_norm, scaled_dot_product_attention, silu

from quire_kernels.cpu.activations import ActivationCode
from quire_kernels.cpu.norms import NormCode

# No size is a multiple of 32, nor are all of 16.
HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, VOCAB, CONTEXT = 54, 6, 2, 16, 83, 101, 80
ACTIVATIONS: dict[ActivationCode, Callable[[Tensor], Tensor]] = {
    ActivationCode.GELU: gelu,
    ActivationCode.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
    ActivationCode.SILU: silu,
    ActivationCode.RELU: relu,
    ActivationCode.RELU2: lambda x: relu(x).square(),
}


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7)
    return (up.clamp(-7, 7) + 1) * gate * (1.702 * gate).sigmoid()


@dataclass
class RandomNorm:
    size: int
    kind: NormCode = NormCode.RMS
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        self.weight = 1 + torch.randn(self.size) / 4
        self.bias = torch.randn(self.size) / 4 if self.kind is NormCode.LAYER else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, (self.size,), self.weight.double(), self.epsilon)
        return layer_norm(x, (self.size,), self.weight.double(), self.bias.double(), self.epsilon)


class RandomInput:
    """What a layer computes of its own vector."""

    def __init__(self, width: int) -> None:
        self.gate, self.up, self.norm = weight(width, HIDDEN), weight(HIDDEN, width), RandomNorm(HIDDEN)


class RandomInputs:
    """The vectors of all layers."""

    def __init__(self, width: int, num_layers: int) -> None:
        self.width, self.embedding_scale, self.scale = width, 3.0, 0.7
        self.embedding = torch.randn(VOCAB, num_layers * width)
        self.projection, self.norm = weight(num_layers * width, HIDDEN), RandomNorm(width)


class RandomLayer:
    def __init__(self, dim: int) -> None:
        self.value_norm: RandomNorm | None = None
        self.values_are_keys, self.scale = False, 1.0
        self.shared: int | None = None
        self.input: RandomInput | None = None
        self.resize_heads(dim)
        self.attention_norm: RandomNorm | None = RandomNorm(HIDDEN)
        self.mlp_norm: RandomNorm | None = RandomNorm(HIDDEN)
        self.query_norm: RandomNorm | None = None
        self.key_norm: RandomNorm | None = None
        self.post_attention_norm: RandomNorm | None = None
        self.post_mlp_norm: RandomNorm | None = None
        self.rope: int | None = 0
        self.activation = ActivationCode.SILU
        self.is_gated, self.is_parallel, self.has_joint_norms, self.norms_after_rotation = True, False, False, False
        self.resize(WIDTH)

    def resize_heads(self, dim: int, kv_parts: int = 2) -> None:
        """Sets the dimensions of heads, and whether they are queries, keys and values, without values, or alone."""
        self.dim = dim
        self.qkv = weight((HEADS + kv_parts * KV_HEADS) * dim, HIDDEN)
        self.output = weight(HIDDEN, HEADS * dim)

    def resize(self, width: int) -> None:
        """Sets the MLP's width."""
        self.gate, self.up, self.down = weight(width, HIDDEN), weight(width, HIDDEN), weight(HIDDEN, width)

    def act(self, x: Tensor) -> Tensor:
        up = linear(x, self.up.double())
        if self.activation is ActivationCode.SWIGLU_OAI:
            return swiglu_oai(linear(x, self.gate.double()), up)
        act = ACTIVATIONS[self.activation]
        return act(linear(x, self.gate.double())) * up if self.is_gated else act(up)


class RandomDecoder:
    def __init__(self, dim: int = DIM) -> None:
        torch.manual_seed(0)
        self.dim = dim
        self.layers = [RandomLayer(dim), RandomLayer(dim)]
        self.ropes = [(torch.logspace(0, -3, dim // 2), 1.0)]
        self.norm = RandomNorm(HIDDEN)
        self.embedding, self.embedding_scale = torch.randn(VOCAB, HIDDEN), 1.0
        self.positions: Tensor | None = None
        self.head = weight(VOCAB, HIDDEN)
        self.head_bias: Tensor | None = None
        self.logits_scale, self.logits_soft_cap = 1.0, 0.0
        self.inputs: RandomInputs | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer

    def round_to(self, dtype: torch.dtype) -> None:
        """Rounds all that has the model's dtype."""
        for layer in self.layers:
            for name in ("qkv", "output", "gate", "up", "down"):
                setattr(layer, name, getattr(layer, name).to(dtype))
            if layer.input is not None:
                layer.input.gate, layer.input.up = layer.input.gate.to(dtype), layer.input.up.to(dtype)
        if self.inputs is not None:
            self.inputs.embedding = self.inputs.embedding.to(dtype)
            self.inputs.projection = self.inputs.projection.to(dtype)
        self.embedding, self.head = self.embedding.to(dtype), self.head.to(dtype)
        self.positions = None if self.positions is None else self.positions.to(dtype)

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits behind each of these tokens, float64 [tokens, VOCAB]."""
        x = self.embedding[tokens].double() * self.embedding_scale
        if self.positions is not None:
            x = x + self.positions[: len(tokens)].double()
        vectors = None if self.inputs is None else self._vectors(self.inputs, tokens, x)
        self._kept.clear()
        for number, layer in enumerate(self.layers):
            inputs = layer.attention_norm(x) if layer.attention_norm else x
            added = linear(self._attend(layer, inputs), layer.output.double())
            added = layer.post_attention_norm(added) if layer.post_attention_norm else added
            seen = x if layer.is_parallel else x + added
            inputs = layer.mlp_norm(seen) if layer.mlp_norm else seen
            widened = linear(layer.act(inputs), layer.down.double())
            x = x + added + (layer.post_mlp_norm(widened) if layer.post_mlp_norm else widened)
            if layer.input is not None and vectors is not None:
                gated = silu(linear(x, layer.input.gate.double())) * vectors[:, number]
                x = x + layer.input.norm(linear(gated, layer.input.up.double()))
            x = x * layer.scale
        bias = None if self.head_bias is None else self.head_bias.double()
        logits = linear(self.norm(x), self.head.double(), bias) * self.logits_scale
        return self.logits_soft_cap * (logits / self.logits_soft_cap).tanh() if self.logits_soft_cap else logits

    def _vectors(self, inputs: RandomInputs, tokens: Tensor, x: Tensor) -> Tensor:
        """[tokens, layers, width]"""
        projected = linear(x, inputs.projection.double()).view(len(tokens), -1, inputs.width)
        embedded = inputs.embedding[tokens].double().view(projected.shape) * inputs.embedding_scale
        return (inputs.norm(projected) + embedded) * inputs.scale

    def _attend(self, layer: RandomLayer, x: Tensor) -> Tensor:
        heads = linear(x, layer.qkv.double()).view(len(x), -1, layer.dim).transpose(0, 1)
        query = self._turned(layer, layer.query_norm, heads[:HEADS])
        if layer.shared is None:
            key, value = heads[HEADS : HEADS + KV_HEADS], heads[-KV_HEADS:]
            value = layer.value_norm(value) if layer.value_norm else value
            self._kept.append((self._turned(layer, layer.key_norm, key), value))
        else:
            self._kept.append(self._kept[layer.shared])
        key, value = self._kept[-1]
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(0, 1).flatten(1)

    def _turned(self, layer: RandomLayer, norm: RandomNorm | None, states: Tensor) -> Tensor:
        if not layer.norms_after_rotation:
            states = self._normalized(layer, norm, states)
        if layer.rope is not None:
            states = self._rotate(layer.rope, states)
        return self._normalized(layer, norm, states) if layer.norms_after_rotation else states

    def _normalized(self, layer: RandomLayer, norm: RandomNorm | None, states: Tensor) -> Tensor:
        if norm is None:
            return states
        if not layer.has_joint_norms:
            return norm(states)
        return norm(states.transpose(0, 1).flatten(1)).view(-1, len(states), layer.dim).transpose(0, 1)

    def _rotate(self, rope: int, states: Tensor) -> Tensor:
        frequencies, factor = self.ropes[rope]
        pairs = len(frequencies)
        angles = torch.arange(states.shape[1])[:, None] * frequencies.double()
        left, right, rest = torch.split(states, [pairs, pairs, states.shape[-1] - 2 * pairs], -1)
        cosine, sine = angles.cos() * factor, angles.sin() * factor
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine, rest], -1)


def weight(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs) * float(inputs**-0.5)
