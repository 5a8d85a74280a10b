"""A model as plain values: its layers in order, and of each tensor its name in the checkpoint, its shape and its role.

An architecture makes a description of a config, and every backend builds its weights from it. Layers may differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
from worker_svc.model.mlp_description import (
    Activation,
    BesideSpec,
    ExpertGroups,
    ExpertScores,
    ExpertsSpec,
    MlpKind,
    MlpSpec,
)
from worker_svc.model.score_head_description import ScoreHeadSpec
from worker_svc.model_layout import KVShape, LayerAttention, ModelLayout

__all__ = [
    "Activation",
    "AttentionSpec",
    "BesideSpec",
    "ComputedFormat",
    "DecoderLayer",
    "ExpertGroups",
    "ExpertScores",
    "ExpertsSpec",
    "InvalidDescription",
    "KVFormat",
    "LatentSpec",
    "LayerInputSpec",
    "LayerInputsSpec",
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


@dataclass(frozen=True, slots=True)
class LayerInputSpec:
    """What a layer does with its own vector of `LayerInputsSpec`, after the MLP:
    x += norm(up(activation(gate(x)) * vector)).
    """

    gate: LinearLayer
    up: LinearLayer
    norm: Norm
    activation: Activation


@dataclass(frozen=True, slots=True)
class LayerInputsSpec:
    """A vector for each token and layer, beside the hidden states x that the layers begin with: of all layers side by
    side (embedding[token] * embedding_scale + norm(projection(x))) * scale, with a norm of each layer's. These are the
    per-layer embeddings of Gemma 3n and 4.
    """

    width: int
    """Of each layer."""
    embedding: str
    """The checkpoint's tensor [vocab_size, num_layers * width]."""
    embedding_scale: float
    """Rounded to the model's dtype."""
    projection: LinearLayer
    norm: Norm
    scale: float


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
    beside: BesideSpec | None = None
    """Beside experts; None: there is nothing else."""
    input: LayerInputSpec | None = None
    """Of a model whose layers have vectors of their own."""
    scale: str | None = None
    """The checkpoint's tensor [1] that x is multiplied by at the end of the layer; None: it stays."""

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those over the hidden size, in the order in which they are computed."""
        norms = (self.attention_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm)
        beside = () if self.beside is None else self.beside.norms
        last = None if self.input is None else self.input.norm
        return tuple(norm for norm in (*norms, *beside, last) if norm is not None)

    @property
    def mlps(self) -> tuple[MlpSpec, ...]:
        """The MLP, or those of all experts and the one beside them."""
        beside = () if self.beside is None else (self.beside.mlp,)
        return (self.mlp,) if isinstance(self.mlp, MlpSpec) else (*self.mlp.mlps, *beside)

    def __post_init__(self) -> None:
        if self.beside is not None:
            has_norms = self.mlp_norm is not None and self.post_mlp_norm is not None
            is_fit = isinstance(self.mlp, ExpertsSpec) and has_norms and not self.parallel
            require(is_fit, "beside", "absent, but beside experts with norms before and behind them")


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
    layer_inputs: LayerInputsSpec | None = None
    """Vectors of the layers' own; None: there are none."""
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
        self._check_shared_layers()
        self._check_layer_inputs()
        require(self.norm.size == hidden, self.norm.tensor, f"of the size {hidden}")
        if (embedding := self.embedding_norm) is not None:
            require(embedding.size == hidden, embedding.tensor, f"of the size {hidden}")
            require(embedding.kind is NormKind.LAYER, embedding.tensor, "a layer norm")
        require(self.head.inputs == hidden, "head", f"of {hidden} inputs")
        require(self.head.outputs == (self.vocab_size,), "head", f"of {self.vocab_size} outputs")
        require(not (self.tied_embeddings and self.head.biased), "head", "without a bias where it is the embedding")
        require(bool(self.layers), "layers", "at least one")

    def _check_shared_layers(self) -> None:
        for number, layer in enumerate(self.layers):
            if (shared := layer.attention.shared_layer) is None:
                continue
            require(0 <= shared < number, "shared_layer", f"below {number}, its own")
            attention, other = layer.attention, self.layers[shared].attention
            require(other.shared_layer is None, "shared_layer", "a layer with keys and values of its own")
            shapes = [(one.num_kv_heads, one.head_dim, one.latent) for one in (attention, other)]
            require(shapes[0] == shapes[1], "shared_layer", "a layer of the same KV heads")

    def _check_layer_inputs(self) -> None:
        given, hidden = self.layer_inputs, self.hidden_size
        for layer in self.layers:
            require((layer.input is None) == (given is None), "input", "present in all layers with layer_inputs")
            if layer.input is not None and given is not None:
                gate, up = layer.input.gate, layer.input.up
                is_fit = (gate.inputs, gate.outputs) == (hidden, (given.width,))
                require(is_fit, gate.role, f"of {hidden} inputs and {given.width} outputs")
                is_fit = (up.inputs, up.outputs) == (given.width, (hidden,))
                require(is_fit, up.role, f"of {given.width} inputs and {hidden} outputs")
                require(layer.input.activation is not Activation.SWIGLU_OAI, "activation", "one of a single product")
        if given is not None:
            projection, width = given.projection, given.width * len(self.layers)
            is_fit = (projection.inputs, projection.outputs) == (hidden, (width,))
            require(is_fit, projection.role, f"of {hidden} inputs and {width} outputs")
            require(given.norm.size == given.width, given.norm.tensor, f"of the size {given.width}")

    @property
    def linear_layers(self) -> Iterator[LinearLayer]:
        """In the order in which they are computed."""
        if self.layer_inputs is not None:
            yield self.layer_inputs.projection
        for layer in self.layers:
            yield layer.attention.qkv
            if (latent := layer.attention.latent) is not None:
                yield from (latent.kv_up,) if latent.query_up is None else (latent.query_up, latent.kv_up)
            yield layer.attention.output
            if not isinstance(layer.mlp, MlpSpec):
                yield layer.mlp.router
            for mlp in layer.mlps:
                yield from (mlp.gate_up, mlp.down)
            if layer.input is not None:
                yield from (layer.input.gate, layer.input.up)
        yield self.head

    @property
    def norms(self) -> Iterator[Norm]:
        """All of them."""
        if self.embedding_norm is not None:
            yield self.embedding_norm
        if self.layer_inputs is not None:
            yield self.layer_inputs.norm
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
        if (inputs := self.layer_inputs) is not None:
            shapes[inputs.embedding] = (self.vocab_size, inputs.width * len(self.layers))
        for norm in self.norms:
            shapes[norm.tensor] = (norm.size,)
            if norm.bias is not None:
                shapes[norm.bias] = (norm.size,)
        for layer in self.layers:
            if layer.attention.sinks is not None:
                shapes[layer.attention.sinks] = (layer.attention.num_heads,)
            if layer.scale is not None:
                shapes[layer.scale] = (1,)
            if isinstance(layer.mlp, ExpertsSpec):
                for name in (layer.mlp.choice_bias, layer.mlp.weight_scales):
                    if name is not None:
                        shapes[name] = (len(layer.mlp.experts),)
        return shapes

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see later ones. Then prompts are computed as a whole, and no tokens are generated."""
        return any(layer.attention.bidirectional for layer in self.layers)

    @property
    def layout(self) -> ModelLayout:
        attentions = [layer.attention for layer in self.layers]
        with_kv = [number for number, each in enumerate(attentions) if each.shared_layer is None]
        places = {number: place for place, number in enumerate(with_kv)}
        return ModelLayout(
            self.vocab_size,
            self.context_length,
            tuple(KVShape(attentions[number].num_kv_heads, attentions[number].head_dim) for number in with_kv),
            tuple(
                LayerAttention(each.scale, each.window, each.soft_cap, each.bidirectional, each.sinks is not None)
                for each in attentions
            ),
            tuple(
                places[number if each.shared_layer is None else each.shared_layer]
                for number, each in enumerate(attentions)
            ),
            keys_hold_values=attentions[0].latent is not None,
        )
