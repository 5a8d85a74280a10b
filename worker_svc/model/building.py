"""One walk over a description, on which a backend's builder makes its weights from the checkpoint's tensors.

Linear layers are read one after the other, and each is released before the next one is read.
"""

import logging
from dataclasses import KW_ONLY, dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from worker_svc.model.description import (
    AttentionSpec,
    BesideSpec,
    DecoderLayer,
    ExpertsSpec,
    LatentSpec,
    LayerInputSpec,
    LayerInputsSpec,
    LinearLayer,
    MlpSpec,
    ModelDescription,
    Norm,
    StoredLinear,
)
from worker_svc.model.linear_weights import WHOLE, LinearWeights, Shard, TiedWeights, WeightParts
from worker_svc.model.stored_linear import is_stored_dense, layer_format, read_stored
from worker_svc.model.tensor_names import described_names
from worker_svc.model.torch_norms import make_torch_norm
from worker_svc.model.weight_format import StoredWeight, block_form
from worker_svc.model.weights import Checkpoint

log = logging.getLogger("quire.worker")

LinearT = TypeVar("LinearT")
NormT = TypeVar("NormT")
ExpertsT = TypeVar("ExpertsT")
HeadT = TypeVar("HeadT")
LinearT_co = TypeVar("LinearT_co", covariant=True)
NormT_co = TypeVar("NormT_co", covariant=True)
ExpertsT_co = TypeVar("ExpertsT_co", covariant=True)
HeadT_co = TypeVar("HeadT_co", covariant=True)

# Of an embedding, that are unpacked at once.
_ROWS = 4096


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The weights of an MLP. They can be read once."""

    spec: MlpSpec
    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights from which a backend builds the experts of a layer. They can be read once."""

    spec: ExpertsSpec
    router: LinearWeights
    experts: tuple[MlpWeights, ...]
    shared: MlpWeights | None
    choice_bias: Tensor | None = None
    """float32 [num_experts], on the model's device."""
    weight_scales: Tensor | None = None
    """float32 [num_experts], on the model's device."""


class BodyBuilder(Protocol[LinearT_co, NormT_co, ExpertsT_co]):
    """Makes a backend's weights of layers from tensors."""

    def linear(self, weights: LinearWeights) -> LinearT_co:
        """A linear layer of the backend. `weights` are not valid after the call."""

    def norm(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> NormT_co:
        """A norm; `weight` and `bias` [norm.size] are in the model's dtype and on its device, as the checkpoint has
        them.
        """

    def experts(self, weights: ExpertWeights) -> ExpertsT_co:
        """The experts of a layer."""


class Builder(BodyBuilder[LinearT_co, NormT_co, ExpertsT_co], Protocol[LinearT_co, NormT_co, ExpertsT_co, HeadT_co]):
    """Makes a backend's weights from tensors."""

    def head(self, weights: WeightParts) -> HeadT_co:
        """The head, whose weight may be the embedding too. `weights` are not valid after the call."""


@dataclass(frozen=True, slots=True)
class BuiltMlp(Generic[LinearT]):
    """The MLP of a layer or an expert."""

    spec: MlpSpec
    gate_up: LinearT
    down: LinearT


@dataclass(frozen=True, slots=True)
class BuiltLatent(Generic[LinearT, NormT]):
    """What latent attention has beside the products of every attention."""

    spec: LatentSpec
    query_norm: NormT | None
    query_up: LinearT | None
    kv_norm: NormT
    kv_up: Tensor
    """[num_heads, plain_dim + value_dim, rank], in the model's dtype and on its device."""


@dataclass(frozen=True, slots=True)
class BuiltBeside(Generic[LinearT, NormT]):
    """An MLP beside experts, and the norms around both."""

    spec: BesideSpec
    mlp: BuiltMlp[LinearT]
    norm: NormT
    post_norm: NormT
    experts_post_norm: NormT
    router_norm: NormT


@dataclass(frozen=True, slots=True)
class BuiltLayerInput(Generic[LinearT, NormT]):
    """What a layer computes of its own vector."""

    spec: LayerInputSpec
    gate: LinearT
    up: LinearT
    norm: NormT


@dataclass(frozen=True, slots=True)
class BuiltLayerInputs(Generic[LinearT, NormT]):
    """The vectors of all layers."""

    spec: LayerInputsSpec
    embedding: Tensor
    """[vocab_size, num_layers * width], contiguous, in the model's dtype and on its device."""
    embedding_scale: float
    """As the dtype of the model has it."""
    projection: LinearT
    norm: NormT


@dataclass(frozen=True, slots=True)
class BuiltLayer(Generic[LinearT, NormT, ExpertsT]):
    """One decoder layer of a backend."""

    spec: DecoderLayer
    attention_norm: NormT | None
    query_norm: NormT | None
    key_norm: NormT | None
    qkv: LinearT
    output: LinearT
    post_attention_norm: NormT | None
    mlp_norm: NormT | None
    mlp: BuiltMlp[LinearT] | ExpertsT
    post_mlp_norm: NormT | None
    latent: BuiltLatent[LinearT, NormT] | None = None
    sinks: Tensor | None = None
    """float32 [num_heads], on the model's device."""
    beside: BuiltBeside[LinearT, NormT] | None = None
    input: BuiltLayerInput[LinearT, NormT] | None = None
    scale: float = 1.0
    """What the hidden states are multiplied by at the end."""


@dataclass(frozen=True, slots=True)
class BuiltBody(Generic[LinearT, NormT, ExpertsT]):
    """The weights of a backend up to the last norm."""

    embedding: Tensor
    """[vocab_size, hidden_size], contiguous, in the model's dtype and on its device, after its norm if there is one."""
    positions: Tensor | None
    """[num_positions, hidden_size], at least as many as the context length, as the embedding."""
    layers: list[BuiltLayer[LinearT, NormT, ExpertsT]]
    norm: NormT
    embedding_scale: float
    """What embeddings are multiplied by, as the dtype of the model has it if the description says so."""
    layer_inputs: BuiltLayerInputs[LinearT, NormT] | None = None


@dataclass(frozen=True, slots=True)
class BuiltModel(BuiltBody[LinearT, NormT, ExpertsT], Generic[LinearT, NormT, ExpertsT, HeadT]):
    """All weights of a backend."""

    _: KW_ONLY
    head: HeadT


def build(
    description: ModelDescription,
    checkpoint: Checkpoint,
    builder: Builder[LinearT, NormT, ExpertsT, HeadT],
    shard: Shard = WHOLE,
) -> BuiltModel[LinearT, NormT, ExpertsT, HeadT]:
    """Builds all weights; linear layers are one rank's, embedding and norms are whole.

    Raises UnsupportedModel where a tensor is missing or of another shape, or ranks cannot share a layer.
    """
    checkpoint.rename(described_names(description, checkpoint.names))
    embedding, stored = _read_table(description.embedding, description.vocab_size, description.hidden_size, checkpoint)
    weights: WeightParts
    if description.tied_embeddings and not _has_own_head(description, checkpoint, embedding):
        drop_head(description, checkpoint)
        share = shard.share(description.vocab_size, description.head.split_unit, description.head.stored[0].name)
        weights = TiedWeights(description.head, embedding[share], stored and stored.outputs(share.start, share.stop))
    else:
        weights = LinearWeights(description.head, checkpoint, shard)
    del stored
    # The head first: while it is made it takes the most memory beside the model, of which there is nothing yet.
    head = builder.head(weights)
    del weights
    if description.embedding_norm is not None:
        embedding = embedding.clone()  # the head may be the embedding as it is stored
    body = _build_body(description, checkpoint, builder, shard, embedding)
    return BuiltModel(
        body.embedding, body.positions, body.layers, body.norm, body.embedding_scale, body.layer_inputs, head=head
    )


def _read_table(name: str, num_rows: int, width: int, checkpoint: Checkpoint) -> tuple[Tensor, StoredWeight | None]:
    """An embedding [num_rows, width], contiguous, in the model's dtype and on its device, and what it was made of, if
    that was not dense.
    """
    layer = name.removesuffix(".weight")
    of = StoredLinear(layer, (num_rows,))
    if block_form(layer_format(of, width, checkpoint.weight_format, checkpoint.names), layer) is None:
        return checkpoint.take(name, num_rows, width).contiguous(), None
    stored, _ = read_stored(checkpoint, of, width)
    table = torch.empty(num_rows, width, dtype=checkpoint.dtype, device=checkpoint.device)
    for start in range(0, num_rows, _ROWS):
        stop = min(start + _ROWS, num_rows)
        table[start:stop].copy_(stored.outputs(start, stop).dense())
    return table, stored


def _apply_norm(embedding: Tensor, norm: Norm, checkpoint: Checkpoint) -> None:
    """Replaces an embedding's vectors by what their norm makes of them."""
    normalize = make_torch_norm(norm, *checkpoint.take_norm(norm))
    for rows in torch.split(embedding, _ROWS):
        rows.copy_(normalize(rows))


def _has_own_head(description: ModelDescription, checkpoint: Checkpoint, embedding: Tensor) -> bool:
    """Whether the checkpoint has a dense head with other numbers than the embedding. transformers ties no such head,
    whatever the config says. One in the format of the other layers is taken for the embedding in fewer bits.
    """
    name = _dense_head(description, checkpoint)
    if name is None or checkpoint.has_numbers(name, embedding):
        return False
    log.warning("config.json ties the head to the embedding, but the model's tensor %s is another: it is used", name)
    return True


def drops_head(description: ModelDescription, checkpoint: Checkpoint) -> bool:
    """Whether `build` leaves a head of the checkpoint unused, since the embedding is the head."""
    checkpoint.rename(described_names(description, checkpoint.names))
    both = {f"{description.head.stored[0].name}.weight", description.embedding}
    if not description.tied_embeddings or not both <= set(checkpoint.names):
        return False
    name = _dense_head(description, checkpoint)
    return name is None or checkpoint.are_equal(name, description.embedding)


def _dense_head(description: ModelDescription, checkpoint: Checkpoint) -> str | None:
    """The tensor of a head that the checkpoint has as plain numbers; None: it has none, or in another format."""
    stored, inputs = description.head.stored[0], description.head.inputs
    is_dense = is_stored_dense(stored, inputs, checkpoint.weight_format, checkpoint.names)
    return f"{stored.name}.weight" if is_dense else None


def drop_head(description: ModelDescription, checkpoint: Checkpoint) -> None:
    """Leaves the head's tensors unused, dense or in the format of the other layers."""
    for stored in description.head.stored:
        checkpoint.drop(f"{stored.name}.weight")
        if stored.bias:
            checkpoint.drop(f"{stored.name}.bias")
        for tensor in checkpoint.weight_format.tensors(stored.name, sum(stored.outputs), description.head.inputs):
            checkpoint.drop(tensor)


def build_body(
    description: ModelDescription,
    checkpoint: Checkpoint,
    builder: BodyBuilder[LinearT, NormT, ExpertsT],
    shard: Shard = WHOLE,
) -> BuiltBody[LinearT, NormT, ExpertsT]:
    """Builds all weights but the head's. Raises as `build` does."""
    checkpoint.rename(described_names(description, checkpoint.names))
    embedding, _ = _read_table(description.embedding, description.vocab_size, description.hidden_size, checkpoint)
    return _build_body(description, checkpoint, builder, shard, embedding)


def _build_body(
    description: ModelDescription,
    checkpoint: Checkpoint,
    builder: BodyBuilder[LinearT, NormT, ExpertsT],
    shard: Shard,
    embedding: Tensor,
) -> BuiltBody[LinearT, NormT, ExpertsT]:
    def rounded(factor: float) -> float:
        return torch.tensor(factor, dtype=checkpoint.dtype).item()

    def weights(layer: LinearLayer) -> LinearWeights:
        return LinearWeights(layer, checkpoint, shard)

    def linear(layer: LinearLayer) -> LinearT:
        return builder.linear(weights(layer))

    def norm(spec: Norm) -> NormT:
        return builder.norm(spec, *checkpoint.take_norm(spec))

    def optional_norm(spec: Norm | None) -> NormT | None:
        return None if spec is None else norm(spec)

    def mlp_weights(spec: MlpSpec) -> MlpWeights:
        return MlpWeights(spec, weights(spec.gate_up), weights(spec.down))

    def mlp(spec: MlpSpec) -> BuiltMlp[LinearT]:
        return BuiltMlp(spec, linear(spec.gate_up), linear(spec.down))

    def mlp_or_experts(spec: MlpSpec | ExpertsSpec) -> BuiltMlp[LinearT] | ExpertsT:
        if isinstance(spec, MlpSpec):
            return mlp(spec)
        shared = None if spec.shared is None else mlp_weights(spec.shared)
        experts = tuple(map(mlp_weights, spec.experts))
        bias, scales = (
            None if name is None else checkpoint.numbers(name, len(experts)).to(checkpoint.device).float()
            for name in (spec.choice_bias, spec.weight_scales)
        )
        return builder.experts(ExpertWeights(spec, weights(spec.router), experts, shared, bias, scales))

    def beside(spec: BesideSpec | None) -> BuiltBeside[LinearT, NormT] | None:
        if spec is None:
            return None
        norms = norm(spec.norm), norm(spec.post_norm), norm(spec.experts_post_norm), norm(spec.router_norm)
        return BuiltBeside(spec, mlp(spec.mlp), *norms)

    def latent(spec: LatentSpec | None) -> BuiltLatent[LinearT, NormT] | None:
        if spec is None:
            return None
        kv_up, _ = weights(spec.kv_up).fused()
        return BuiltLatent(
            spec,
            optional_norm(spec.query_norm),
            None if spec.query_up is None else linear(spec.query_up),
            norm(spec.kv_norm),
            kv_up.view(-1, spec.plain_dim + spec.value_dim, spec.rank),
        )

    def sinks(spec: AttentionSpec) -> Tensor | None:
        if spec.sinks is None:
            return None
        share = shard.share(spec.num_heads, 1, spec.sinks)
        return checkpoint.numbers(spec.sinks, spec.num_heads)[share].to(checkpoint.device).float()

    def layer_input(spec: LayerInputSpec | None) -> BuiltLayerInput[LinearT, NormT] | None:
        return None if spec is None else BuiltLayerInput(spec, linear(spec.gate), linear(spec.up), norm(spec.norm))

    def layer_inputs(spec: LayerInputsSpec | None) -> BuiltLayerInputs[LinearT, NormT] | None:
        if spec is None:
            return None
        width = spec.width * len(description.layers)
        table, _ = _read_table(spec.embedding, description.vocab_size, width, checkpoint)
        return BuiltLayerInputs(spec, table, rounded(spec.embedding_scale), linear(spec.projection), norm(spec.norm))

    def layer(spec: DecoderLayer) -> BuiltLayer[LinearT, NormT, ExpertsT]:
        attention, attention_norm = spec.attention, optional_norm(spec.attention_norm)
        return BuiltLayer(
            spec,
            attention_norm=attention_norm,
            query_norm=optional_norm(attention.query_norm),
            key_norm=optional_norm(attention.key_norm),
            qkv=linear(attention.qkv),
            output=linear(attention.output),
            post_attention_norm=optional_norm(spec.post_attention_norm),
            mlp_norm=attention_norm if spec.mlp_norm == spec.attention_norm else optional_norm(spec.mlp_norm),
            mlp=mlp_or_experts(spec.mlp),
            post_mlp_norm=optional_norm(spec.post_mlp_norm),
            latent=latent(attention.latent),
            sinks=sinks(attention),
            beside=beside(spec.beside),
            input=layer_input(spec.input),
            scale=1.0 if spec.scale is None else checkpoint.numbers(spec.scale, 1).float().item(),
        )

    if description.embedding_norm is not None:
        _apply_norm(embedding, description.embedding_norm, checkpoint)
    positions = description.positions
    places = None
    if positions is not None:
        places = checkpoint.take(positions.tensor, positions.num_rows, description.hidden_size)[
            positions.first :
        ].contiguous()
    inputs = layer_inputs(description.layer_inputs)
    layers = [layer(spec) for spec in description.layers]
    scale = description.embedding_scale
    if description.rounds_embedding_scale:
        scale = rounded(scale)
    return BuiltBody(embedding, places, layers, norm(description.norm), scale, inputs)
