"""A model as plain values: its layers in order, and of each tensor its name in the checkpoint, its shape and its role.

An architecture makes a description of a config, and every backend builds its weights from it. Layers may differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from worker_svc.model.attention_description import AttentionSpec, KVFormat, LatentSpec, RopeConfig, RopeKind
from worker_svc.model.linear_description import (
    ComputedFormat,
    InvalidDescription,
    LinearLayer,
    LinearRole,
    Norm,
    NormKind,
    SplitDimension,
    StoredLinear,
    require,
)
from worker_svc.model.score_head_description import ScoreHeadSpec
from worker_svc.model_layout import LayerAttention, ModelLayout

__all__ = [
    "Activation",
    "AttentionSpec",
    "ComputedFormat",
    "DecoderLayer",
    "ExpertGroups",
    "ExpertScores",
    "ExpertsSpec",
    "InvalidDescription",
    "KVFormat",
    "LatentSpec",
    "LinearLayer",
    "LinearRole",
    "MlpKind",
    "MlpSpec",
    "ModelDescription",
    "Norm",
    "NormKind",
    "PositionEmbedding",
    "RopeConfig",
    "RopeKind",
    "SplitDimension",
    "StoredLinear",
    "require",
]


class MlpKind(StrEnum):
    """The form of an MLP."""

    GATED = "gated"
    """down(activation(gate(x)) * up(x))"""
    PLAIN = "plain"
    """down(activation(up(x)))"""


class Activation(StrEnum):
    """The function between an MLP's products."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU2 = "relu2"
    """The square of RELU (arXiv:2109.08668)."""
    SWIGLU_OAI = "swiglu_oai"
    """Of gated MLPs alone: (up + 1) * gate * sigmoid(1.702 * gate), after gate is limited to at most 7 and up to -7
    to 7.
    """


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """The MLP of a layer. Where it is plain, `gate_up` has one part."""

    width: int
    gate_up: LinearLayer
    down: LinearLayer
    kind: MlpKind = MlpKind.GATED
    activation: Activation = Activation.SILU

    def __post_init__(self) -> None:
        require(self.width > 0, "width", "above 0")
        outputs = (self.width,) * (2 if self.kind is MlpKind.GATED else 1)
        require(self.gate_up.outputs == outputs, "gate_up", f"of the outputs {outputs}")
        is_fit = self.kind is MlpKind.GATED or self.activation is not Activation.SWIGLU_OAI
        require(is_fit, "activation", "one of a single product where the MLP is plain")
        require(self.down.inputs == self.width, "down", f"of {self.width} inputs")


class ExpertScores(StrEnum):
    """The function that makes weights of a router's outputs."""

    SOFTMAX = "softmax"
    """Over all experts."""
    SIGMOID = "sigmoid"
    """Of each output alone."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Groups of consecutive experts of equal number: a token's experts are of the groups with the largest sums of
    their best weights (arXiv:2405.04434, section 2.2.2).
    """

    count: int
    num_chosen: int
    """Groups of each token."""
    num_summed: int
    """How many of a group's best weights are summed."""

    def __post_init__(self) -> None:
        # The compiled kernels hold no more. DeepSeek-V3 has 8 groups, and sums 2 weights.
        require(max(self.count, self.num_summed) <= 256, "groups", "at most 256, of as many summed weights")


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts (arXiv:2401.04088): a router scores them for each token, and the outputs of those with the
    largest weights are added, each times its weight: a function of the scores.
    """

    router: LinearLayer
    """An output for each expert, in float32, and in a second part of one output the gate of the shared MLP."""
    num_chosen: int
    """Experts of each token."""
    normalized: bool
    """Whether the weights of the chosen experts are divided by their sum, as a softmax of their scores alone."""
    experts: tuple[MlpSpec, ...]
    shared: MlpSpec | None = None
    """For all tokens; its output is multiplied by the sigmoid of its gate, if there is one, and added."""
    scale: float = 1.0
    """Factor of the weights."""
    fused: tuple[str, str] | None = None
    """Tensors of all experts that some checkpoints have: gate and up [experts, 2 * width, inputs], and down."""
    stacked: str | None = None
    """First part of the names of tensors that have a first dimension of experts, and are otherwise those of one expert,
    whose names have its number behind this part.
    """
    fused_may_be_transposed: bool = False
    """Whether some checkpoints have them as [experts, inputs, outputs]."""
    scores: ExpertScores = ExpertScores.SOFTMAX
    groups: ExpertGroups | None = None
    """None: experts are chosen among all."""
    choice_bias: str | None = None
    """The checkpoint's tensor [experts] that is added to the weights to choose experts, and not to their use."""

    def __post_init__(self) -> None:
        count, first = len(self.experts), self.experts[0]
        outputs = (count, 1) if self.has_shared_gate else (count,)
        require(self.router.outputs == outputs, "router", f"of the outputs {outputs}")
        require(not self.has_shared_gate or self.shared is not None, "router", "without a gate where no MLP is shared")
        choice = count
        if self.groups is not None:
            size, rest = divmod(count, self.groups.count)
            require(rest == 0, "groups", f"a divisor of {count} experts")
            require(1 <= self.groups.num_chosen <= self.groups.count, "groups", f"chosen among {self.groups.count}")
            require(1 <= self.groups.num_summed <= size, "groups", f"of at least {self.groups.num_summed} experts")
            choice = size * self.groups.num_chosen
        require(1 <= self.num_chosen <= choice, "num_chosen", f"1 to {choice} experts")
        for mlp in self.mlps:
            require(mlp.kind is MlpKind.GATED, "experts", "gated MLPs")
            require(mlp.activation is first.activation, "experts", f"MLPs with the activation {first.activation}")
            require(mlp.width == first.width or mlp is self.shared, "experts", f"of the width {first.width}")

        for mlp in self.experts:
            is_alike = mlp.gate_up.biased == first.gate_up.biased and mlp.down.biased == first.down.biased
            require(is_alike, "experts", "all with biases, or all without")

    @property
    def has_shared_gate(self) -> bool:
        return len(self.router.outputs) > 1

    @property
    def mlps(self) -> tuple[MlpSpec, ...]:
        """Those of the experts, and the shared one."""
        return self.experts if self.shared is None else (*self.experts, self.shared)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """x += attention(norm(x)), then x += mlp(norm(x))."""

    attention_norm: Norm | None
    """None: attention sees x as it is."""
    attention: AttentionSpec
    mlp_norm: Norm | None
    """None: the MLP sees x as it is."""
    mlp: MlpSpec | ExpertsSpec
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    """Of what attention and MLP return, before it is added to x."""
    parallel: bool = False
    """x += attention(attention_norm(x)) + mlp(mlp_norm(x)): both see the same x, and may have one norm."""

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those over the hidden size, in the order in which they are computed."""
        norms = (self.attention_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm)
        return tuple(norm for norm in norms if norm is not None)

    @property
    def mlps(self) -> tuple[MlpSpec, ...]:
        """The MLP, or those of all experts."""
        return (self.mlp,) if isinstance(self.mlp, MlpSpec) else self.mlp.mlps


@dataclass(frozen=True, slots=True)
class PositionEmbedding:
    """A table that holds a vector for each position, which is added to the embedding."""

    tensor: str
    """[num_rows, hidden_size]"""
    num_rows: int
    """As stored; a worker may serve a shorter context."""
    first: int = 0
    """The row of the first position; rows before it are not used."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A decoder, or an encoder with the layers of one: an embedding, layers, a norm, and a head whose outputs are the
    logits.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    context_length: int
    embedding: str
    """The checkpoint's tensor [vocab_size, hidden_size]."""
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: LinearLayer
    tied_embeddings: bool
    """Whether the head's weight is the embedding, unless the checkpoint has a dense head with other numbers."""
    embedding_scale: float = 1.0
    """What embeddings are multiplied by."""
    rounds_embedding_scale: bool = False
    """Whether that factor is rounded to the model's dtype."""
    embedding_norm: Norm | None = None
    """Of embeddings, which positions are added to."""
    positions: PositionEmbedding | None = None
    logits_scale: float = 1.0
    """What logits are multiplied by, before their soft cap."""
    logits_soft_cap: float | None = None
    """Logits x become c * tanh(x / c); None: they stay."""
    renamed: tuple[tuple[str, str], ...] = ()
    """How tensors are called in some checkpoints, and how here: the first parts of their names, with the dots."""
    unused_suffixes: tuple[str, ...] = ()
    """Last parts of the names of tensors that some checkpoints have and that are computed here, such as masks."""
    unused_prefixes: tuple[str, ...] = ()
    """First parts of the names of tensors that some checkpoints have and that have no effect here."""
    is_encoder: bool = False
    """Whether its class is that of an encoder: its vectors are means where its files do not say otherwise."""
    score_head: ScoreHeadSpec | None = None
    """Of a model that scores pairs of texts and has no logits; None: it generates, or computes embeddings."""

    def __post_init__(self) -> None:
        """Backends use these sizes without further checks."""
        hidden = self.hidden_size
        for layer in self.layers:
            routers = () if isinstance(layer.mlp, MlpSpec) else (layer.mlp.router,)
            for linear in (layer.attention.qkv, *routers, *(mlp.gate_up for mlp in layer.mlps)):
                require(linear.inputs == hidden, linear.role, f"of {hidden} inputs")
            for linear in (layer.attention.output, *(mlp.down for mlp in layer.mlps)):
                require(linear.outputs == (hidden,), linear.role, f"of {hidden} outputs")
            for norm in layer.norms:
                require(norm.size == hidden, norm.tensor, f"of the size {hidden}")
        require(self.norm.size == hidden, self.norm.tensor, f"of the size {hidden}")
        if (embedding := self.embedding_norm) is not None:
            require(embedding.size == hidden, embedding.tensor, f"of the size {hidden}")
            require(embedding.kind is NormKind.LAYER, embedding.tensor, "a layer norm")
        require(self.head.inputs == hidden, "head", f"of {hidden} inputs")
        require(self.head.outputs == (self.vocab_size,), "head", f"of {self.vocab_size} outputs")
        require(not (self.tied_embeddings and self.head.biased), "head", "without a bias where it is the embedding")
        require(bool(self.layers), "layers", "at least one")

    @property
    def linear_layers(self) -> Iterator[LinearLayer]:
        """In the order in which they are computed."""
        for layer in self.layers:
            yield layer.attention.qkv
            if (latent := layer.attention.latent) is not None:
                yield from (latent.kv_up,) if latent.query_up is None else (latent.query_up, latent.kv_up)
            yield layer.attention.output
            if not isinstance(layer.mlp, MlpSpec):
                yield layer.mlp.router
            for mlp in layer.mlps:
                yield from (mlp.gate_up, mlp.down)
        yield self.head

    @property
    def norms(self) -> Iterator[Norm]:
        """All of them."""
        if self.embedding_norm is not None:
            yield self.embedding_norm
        for layer in self.layers:
            yield from layer.norms
            yield from layer.attention.norms
        yield self.norm

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors but those of linear layers, by their names."""
        shapes: dict[str, tuple[int, ...]] = {self.embedding: (self.vocab_size, self.hidden_size)}
        if self.positions is not None:
            shapes[self.positions.tensor] = (self.positions.num_rows, self.hidden_size)
        for norm in self.norms:
            shapes[norm.tensor] = (norm.size,)
            if norm.bias is not None:
                shapes[norm.bias] = (norm.size,)
        for layer in self.layers:
            if layer.attention.sinks is not None:
                shapes[layer.attention.sinks] = (layer.attention.num_heads,)
            if isinstance(layer.mlp, ExpertsSpec) and layer.mlp.choice_bias is not None:
                shapes[layer.mlp.choice_bias] = (len(layer.mlp.experts),)
        return shapes

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see later ones. Then prompts are computed as a whole, and no tokens are generated."""
        return any(layer.attention.bidirectional for layer in self.layers)

    @property
    def layout(self) -> ModelLayout:
        """KV heads and their dimensions are the first layer's: see `support`."""
        first = self.layers[0].attention
        layers = tuple(
            LayerAttention(each.scale, each.window, each.soft_cap, each.bidirectional, each.sinks is not None)
            for each in (layer.attention for layer in self.layers)
        )
        return ModelLayout(
            self.vocab_size,
            self.context_length,
            first.num_kv_heads,
            first.head_dim,
            layers,
            keys_hold_values=first.latent is not None,
        )
