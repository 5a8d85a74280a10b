"""A model as plain values: its layers in order, and of each tensor its name in the checkpoint, its shape and its role.

An architecture makes a description of a config, and every backend builds its weights from it. Layers may differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum

from worker_svc.model_layout import LayerAttention, ModelLayout


class InvalidDescription(ValueError):  # noqa: N818
    """Sizes that contradict each other. The text names the field and says what it must be."""


def require(holds: bool, name: str, must_be: str) -> None:
    """Raises InvalidDescription unless a field holds."""
    if not holds:
        raise InvalidDescription(f"{name}: must be {must_be}")


class RopeKind(Enum):
    """How the frequencies of rotary positions are scaled."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    """Only within the original context, so that keys in the cache keep their frequencies."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: base, and the scaling of its kind."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    """All kinds but DEFAULT."""
    original_context_length: int = 0
    """LLAMA3 and YARN."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    """LLAMA3."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """YARN: whether the dimensions at which blending begins and ends are rounded outwards."""
    attention_factor: float = 1.0
    """Factor of rotated queries and keys; other than 1 only for YARN and LONGROPE."""
    rotated_dims: int | None = None
    """How many dimensions of each head are rotated, the first ones; None: all."""
    pair_factors: tuple[float, ...] = ()
    """LONGROPE: what the frequency of each pair of dimensions is divided by."""


class LinearRole(StrEnum):
    """The purpose of a linear layer."""

    QKV = "qkv"
    ATTENTION_OUTPUT = "attention_output"
    GATE_UP = "gate_up"
    DOWN = "down"
    ROUTER = "router"
    HEAD = "head"


class ComputedFormat(StrEnum):
    """The format in which the weight of a linear layer is kept and multiplied."""

    MODEL = "model"
    """The dtype that the model computes in."""
    INT8 = "int8"
    """8 bits, with a scale for each output."""


class KVFormat(StrEnum):
    """The format of a layer's keys and values."""

    MODEL = "model"
    """The dtype that the model computes in."""
    FP8 = "fp8"
    INT8 = "int8"


class SplitDimension(StrEnum):
    """The dimension of a weight [outputs, inputs] that ranks divide among them."""

    OUTPUTS = "outputs"
    """Each rank computes some of the outputs, of every part its share."""
    INPUTS = "inputs"
    """Each rank computes a summand of all outputs, from its share of the inputs."""


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A linear layer as the checkpoint stores it: `name`.weight [sum of outputs, inputs], and optionally `name`.bias.

    `outputs` are the widths of its parts, side by side: (queries, keys, values) if one tensor holds all three. Adapters
    name stored layers too.
    """

    name: str
    outputs: tuple[int, ...]
    bias: bool = False
    transposed: bool = False
    """The stored weight is [inputs, sum of outputs]."""
    interleaved: int | None = None
    """The parts take turns, each with this many outputs: those of one head. None: each part is whole."""

    def __post_init__(self) -> None:
        if self.interleaved is not None:
            alike = len(set(self.outputs)) == 1 and self.outputs[0] % self.interleaved == 0
            require(alike, self.name, f"of parts with the same number of outputs, a multiple of {self.interleaved}")


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer that a backend computes as one product: the parts of its stored layers, side by side."""

    role: LinearRole
    inputs: int
    stored: tuple[StoredLinear, ...]
    split: SplitDimension
    split_unit: int = 1
    """Outputs of each part, or inputs, that stay together on a rank: those of one head."""
    computed: ComputedFormat | None = None
    """None: what the worker's settings choose."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """The width of each part."""
        return tuple(width for stored in self.stored for width in stored.outputs)

    @property
    def biased(self) -> bool:
        """Whether any part has a bias; the biases of the other parts are zeros."""
        return any(stored.bias for stored in self.stored)


class NormKind(StrEnum):
    """The kind of a normalisation."""

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the last dimension, and the checkpoint's tensor [size] that multiplies its result; one that
    is added to it, for a LAYER norm only.
    """

    tensor: str
    size: int
    eps: float
    kind: NormKind = NormKind.RMS
    weight_offset: float = 0.0
    """Added to the weight: 1 where a checkpoint stores its distance from 1."""
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention with grouped queries."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """What scores are multiplied by."""
    qkv: LinearLayer
    output: LinearLayer
    rope: RopeConfig | None
    """None: no positions."""
    window: int | None = None
    """How many keys up to its own a query sees; None: all."""
    soft_cap: float | None = None
    """Scores s become c * tanh(s / c); None: they stay."""
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    """Of each head, or of all heads together, before rotation."""
    kv_format: KVFormat | None = None
    """None: what the worker's settings choose."""

    def __post_init__(self) -> None:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        require(self.num_heads % self.num_kv_heads == 0, "num_heads", f"a multiple of {self.num_kv_heads} KV heads")
        require(self.qkv.outputs == (queries, keys, keys), "qkv", f"of the outputs {(queries, keys, keys)}")
        require(self.output.inputs == queries, "output", f"of {queries} inputs")
        for name, norm, whole in (("query_norm", self.query_norm, queries), ("key_norm", self.key_norm, keys)):
            size = whole if self.has_joint_norms else self.head_dim
            require(norm is None or norm.size == size, name, f"of the size {self.head_dim}, or {whole} for all heads")

    @property
    def has_joint_norms(self) -> bool:
        """Whether the norms are of all heads together."""
        norms = self.query_norm, self.key_norm
        return any(norm is not None and norm.size != self.head_dim for norm in norms)


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


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """The MLP of a layer. Where it is plain, `gate_up` has one part."""

    width: int
    gate_up: LinearLayer
    down: LinearLayer
    kind: MlpKind = MlpKind.GATED
    activation: Activation = Activation.SILU

    def __post_init__(self) -> None:
        outputs = (self.width,) * (2 if self.kind is MlpKind.GATED else 1)
        require(self.gate_up.outputs == outputs, "gate_up", f"of the outputs {outputs}")
        require(self.down.inputs == self.width, "down", f"of {self.width} inputs")


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts (arXiv:2401.04088): a router scores them for each token, and the outputs of those with the
    largest scores are added, each times its weight: a softmax of the scores of all experts.
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

    def __post_init__(self) -> None:
        count, first = len(self.experts), self.experts[0]
        outputs = (count, 1) if self.has_shared_gate else (count,)
        require(self.router.outputs == outputs, "router", f"of the outputs {outputs}")
        require(not self.has_shared_gate or self.shared is not None, "router", "without a gate where no MLP is shared")
        require(1 <= self.num_chosen <= count, "num_chosen", f"1 to {count} experts")
        for mlp in self.mlps:
            require(mlp.kind is MlpKind.GATED, "experts", "gated MLPs")
            require(mlp.activation is first.activation, "experts", f"MLPs with the activation {first.activation}")
            require(not mlp.gate_up.biased and not mlp.down.biased, "experts", "without biases")
            require(mlp.width == first.width or mlp is self.shared, "experts", f"of the width {first.width}")

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

    attention_norm: Norm
    attention: AttentionSpec
    mlp_norm: Norm
    mlp: MlpSpec | ExpertsSpec
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    """Of what attention and MLP return, before it is added to x."""
    parallel: bool = False
    """x += attention(attention_norm(x)) + mlp(mlp_norm(x)): both see the same x."""

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
    """A decoder: an embedding, layers, a norm, and a head whose outputs are the logits."""

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
    """Whether the head's weight is the embedding; a copy in the checkpoint is not read."""
    embedding_scale: float = 1.0
    """What embeddings are multiplied by, rounded to the model's dtype."""
    positions: PositionEmbedding | None = None
    logits_soft_cap: float | None = None
    """Logits x become c * tanh(x / c); None: they stay."""
    renamed: tuple[tuple[str, str], ...] = ()
    """How tensors are called in some checkpoints, and how here: the first parts of their names, with the dots."""
    unused_suffixes: tuple[str, ...] = ()
    """Last parts of the names of tensors that some checkpoints have and that are computed here, such as masks."""

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
        require(self.head.inputs == hidden, "head", f"of {hidden} inputs")
        require(self.head.outputs == (self.vocab_size,), "head", f"of {self.vocab_size} outputs")
        require(bool(self.layers), "layers", "at least one")

    @property
    def linear_layers(self) -> Iterator[LinearLayer]:
        """In the order in which they are computed."""
        for layer in self.layers:
            yield from (layer.attention.qkv, layer.attention.output)
            if not isinstance(layer.mlp, MlpSpec):
                yield layer.mlp.router
            for mlp in layer.mlps:
                yield from (mlp.gate_up, mlp.down)
        yield self.head

    @property
    def norms(self) -> Iterator[Norm]:
        """All of them."""
        for layer in self.layers:
            yield from layer.norms
            yield from (norm for norm in (layer.attention.query_norm, layer.attention.key_norm) if norm is not None)
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
        return shapes

    @property
    def layout(self) -> ModelLayout:
        """KV heads and their dimensions are the first layer's: see `support`."""
        first = self.layers[0].attention
        layers = tuple(
            LayerAttention(layer.attention.scale, layer.attention.window, layer.attention.soft_cap)
            for layer in self.layers
        )
        return ModelLayout(self.vocab_size, self.context_length, first.num_kv_heads, first.head_dim, layers)
