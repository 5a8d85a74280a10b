"""One walk over a description, on which a backend's builder makes its weights from the checkpoint's tensors.

Linear layers are read one after the other, and each is released before the next one is read.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from worker_svc.model.description import DecoderLayer, LinearLayer, ModelDescription, Norm
from worker_svc.model.linear_weights import WHOLE, LinearWeights, Shard
from worker_svc.model.weights import Checkpoint

LinearT = TypeVar("LinearT")
NormT = TypeVar("NormT")
HeadT = TypeVar("HeadT")
LinearT_co = TypeVar("LinearT_co", covariant=True)
NormT_co = TypeVar("NormT_co", covariant=True)
HeadT_co = TypeVar("HeadT_co", covariant=True)


class BodyBuilder(Protocol[LinearT_co, NormT_co]):
    """Makes a backend's weights of layers from tensors."""

    def linear(self, weights: LinearWeights) -> LinearT_co:
        """A linear layer of the backend. `weights` are not valid after the call."""

    def norm(self, norm: Norm, weight: Tensor) -> NormT_co:
        """A norm; `weight` [norm.size] is in the model's dtype and on its device."""


class Builder(BodyBuilder[LinearT_co, NormT_co], Protocol[LinearT_co, NormT_co, HeadT_co]):
    """Makes a backend's weights from tensors."""

    def head(self, layer: LinearLayer, weight: Tensor) -> HeadT_co:
        """The head, of a weight [vocab_size, hidden_size] that may be the embedding too."""


@dataclass(frozen=True, slots=True)
class BuiltLayer(Generic[LinearT, NormT]):
    """One decoder layer of a backend."""

    spec: DecoderLayer
    attention_norm: NormT
    query_norm: NormT | None
    key_norm: NormT | None
    qkv: LinearT
    output: LinearT
    mlp_norm: NormT
    gate_up: LinearT
    down: LinearT


@dataclass(frozen=True, slots=True)
class BuiltBody(Generic[LinearT, NormT]):
    """The weights of a backend up to the last norm."""

    embedding: Tensor
    """[vocab_size, hidden_size], contiguous, in the model's dtype and on its device."""
    layers: list[BuiltLayer[LinearT, NormT]]
    norm: NormT


@dataclass(frozen=True, slots=True)
class BuiltModel(BuiltBody[LinearT, NormT], Generic[LinearT, NormT, HeadT]):
    """All weights of a backend."""

    head: HeadT


def build(
    description: ModelDescription,
    checkpoint: Checkpoint,
    builder: Builder[LinearT, NormT, HeadT],
    shard: Shard = WHOLE,
) -> BuiltModel[LinearT, NormT, HeadT]:
    """Builds all weights; linear layers are one rank's, embedding and norms are whole.

    Raises UnsupportedModel where a tensor is missing or of another shape, or ranks cannot share a layer.
    """
    body = build_body(description, checkpoint, builder, shard)
    if description.tied_embeddings:
        drop_head(description, checkpoint)
        name = description.head.stored[0].name
        weight = body.embedding[shard.share(description.vocab_size, description.head.split_unit, name)]
    else:
        weight, _ = LinearWeights(description.head, checkpoint, shard).fused()
    return BuiltModel(body.embedding, body.layers, body.norm, builder.head(description.head, weight))


def drop_head(description: ModelDescription, checkpoint: Checkpoint) -> None:
    """Leaves the head's tensors unused, dense or in the format of the other layers."""
    for stored in description.head.stored:
        checkpoint.drop(f"{stored.name}.weight")
        for tensor in checkpoint.weight_format.tensors(stored.name, sum(stored.outputs), description.head.inputs):
            checkpoint.drop(tensor)


def build_body(
    description: ModelDescription,
    checkpoint: Checkpoint,
    builder: BodyBuilder[LinearT, NormT],
    shard: Shard = WHOLE,
) -> BuiltBody[LinearT, NormT]:
    """Builds all weights but the head's. Raises as `build` does."""

    def linear(layer: LinearLayer) -> LinearT:
        return builder.linear(LinearWeights(layer, checkpoint, shard))

    def norm(spec: Norm) -> NormT:
        return builder.norm(spec, checkpoint.take(spec.tensor, spec.size))

    def layer(spec: DecoderLayer) -> BuiltLayer[LinearT, NormT]:
        attention, mlp = spec.attention, spec.mlp
        return BuiltLayer(
            spec,
            attention_norm=norm(spec.attention_norm),
            query_norm=None if attention.query_norm is None else norm(attention.query_norm),
            key_norm=None if attention.key_norm is None else norm(attention.key_norm),
            qkv=linear(attention.qkv),
            output=linear(attention.output),
            mlp_norm=norm(spec.mlp_norm),
            gate_up=linear(mlp.gate_up),
            down=linear(mlp.down),
        )

    embedding = checkpoint.take(description.embedding, description.vocab_size, description.hidden_size).contiguous()
    layers = [layer(spec) for spec in description.layers]
    return BuiltBody(embedding, layers, norm(description.norm))
