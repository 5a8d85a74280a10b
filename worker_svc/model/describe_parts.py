"""Parts of descriptions that several families share."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from worker_svc.model.description import (
    Activation,
    AttentionSpec,
    LinearLayer,
    LinearRole,
    MlpKind,
    MlpSpec,
    ModelDescription,
    Norm,
    NormKind,
    RopeConfig,
    SplitDimension,
    StoredLinear,
)

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
}
"""By the names that transformers has in configs."""


@dataclass(frozen=True, slots=True)
class NormForm:
    """What all norms of a model have in common, as `Norm` has it."""

    eps: float
    kind: NormKind = NormKind.RMS
    weight_offset: float = 0.0
    has_bias: bool = False

    def norm(self, name: str, size: int) -> Norm:
        """The norm with the tensors `name`.weight, and `name`.bias if norms have one."""
        bias = f"{name}.bias" if self.has_bias else None
        return Norm(f"{name}.weight", size, self.eps, self.kind, self.weight_offset, bias)


def describe_head(hidden_size: int, vocab_size: int, *, bias: bool = False) -> LinearLayer:
    stored = (StoredLinear("lm_head", (vocab_size,), bias),)
    return LinearLayer(LinearRole.HEAD, hidden_size, stored, SplitDimension.OUTPUTS)


def describe_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    qkv: tuple[StoredLinear, ...],
    output: StoredLinear,
    *,
    rope: RopeConfig | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
    bidirectional: bool = False,
    rotates_neighbours: bool = False,
    value_norm_eps: float | None = None,
    values_are_keys: bool = False,
    shared_layer: int | None = None,
) -> AttentionSpec:
    """Attention with the hidden size of `output`. The scale defaults to the inverse root of the head's dimensions.
    `rotates_neighbours`: whether pairs of rotated dimensions are (2i, 2i + 1).
    """
    (hidden,) = output.outputs
    neighbours = (rope.rotated_dims or head_dim) if rotates_neighbours and rope is not None else None
    queries = num_heads * head_dim
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        scale=float(head_dim**-0.5) if scale is None else scale,
        qkv=LinearLayer(LinearRole.QKV, hidden, qkv, SplitDimension.OUTPUTS, head_dim, rotated_neighbours=neighbours),
        output=LinearLayer(LinearRole.ATTENTION_OUTPUT, queries, (output,), SplitDimension.INPUTS, head_dim),
        rope=rope,
        window=window,
        soft_cap=soft_cap,
        query_norm=query_norm,
        key_norm=key_norm,
        bidirectional=bidirectional,
        value_norm_eps=value_norm_eps,
        values_are_keys=values_are_keys,
        shared_layer=shared_layer,
    )


def describe_mlp(
    kind: MlpKind, gate_up: tuple[StoredLinear, ...], down: StoredLinear, activation: Activation
) -> MlpSpec:
    """An MLP with the hidden size of `down`."""
    (hidden,) = down.outputs
    width = gate_up[0].outputs[0]
    return MlpSpec(
        width,
        LinearLayer(LinearRole.GATE_UP, hidden, gate_up, SplitDimension.OUTPUTS),
        LinearLayer(LinearRole.DOWN, width, (down,), SplitDimension.INPUTS),
        kind,
        activation,
    )


def norm_called(name: str, other: Norm | None) -> Norm:
    """A norm like another one, whose tensors stand beside those of that one and are called `name`."""
    assert other is not None, "models that are named as Llama have it"
    prefix = other.tensor.removesuffix(".weight").rpartition(".")[0]
    return replace(other, tensor=f"{prefix}.{name}.weight", bias=other.bias and f"{prefix}.{name}.bias")


def fused(linear: LinearLayer, name: str) -> LinearLayer:
    """The same layer, whose parts one tensor of this name holds, where the first one of them was."""
    prefix = linear.stored[0].name.rpartition(".")[0]
    return replace(linear, stored=(StoredLinear(f"{prefix}.{name}", linear.outputs),))


def with_positions_where(description: ModelDescription, has_positions: Iterable[bool]) -> ModelDescription:
    """The description without rotary positions in the layers for which this is false."""
    layers = tuple(
        layer if has else replace(layer, attention=replace(layer.attention, rope=None))
        for layer, has in zip(description.layers, has_positions, strict=True)
    )
    return replace(description, layers=layers)


def in_parallel(description: ModelDescription) -> ModelDescription:
    """The description with attention and MLP side by side, behind the norm of attention."""
    layers = tuple(replace(layer, mlp_norm=layer.attention_norm, parallel=True) for layer in description.layers)
    return replace(description, layers=layers)


def layer_norms(eps: float) -> NormForm:
    """Layer norms with weights and biases."""
    return NormForm(eps, NormKind.LAYER, has_bias=True)
