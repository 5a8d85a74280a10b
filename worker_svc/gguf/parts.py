"""What the plan of a model directory's tensors takes of a description, of a decoder or an encoder."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from worker_svc.model.architecture import AnyDescription
from worker_svc.model.description import LinearLayer, ModelDescription
from worker_svc.model.encoder_description import EncoderDescription

# In models without a head.
_WORDS = "embeddings.word_embeddings.weight"
# Of encoders with the layers of decoders.
_OF_ENCODERS = "model."


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The tensors of a model, by the names in its directory."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of all tensors but those of linear layers."""
    tables: Collection[str]
    """Embeddings that may stay in blocks."""
    linear_layers: Sequence[LinearLayer]
    """Those that have tensors of their own."""
    qkv: Sequence[LinearLayer]
    """Of each layer, in order."""
    heads: Sequence[tuple[int, int]]
    """The numbers of heads of queries and of keys, of each layer."""
    offsets: Mapping[str, float]
    """What is subtracted from weights of norms."""
    unused_prefixes: tuple[str, ...]
    """Of tensors that a file may have and that the model does not need."""
    prefix: str = ""
    """What names begin with that the package gguf knows without it."""


def parts_of(description: AnyDescription) -> ModelParts:
    """The parts of a described model."""
    if isinstance(description, EncoderDescription):
        return _of_encoder(description)
    return _of_decoder(description)


def _of_decoder(description: ModelDescription) -> ModelParts:
    inputs, layers = description.layer_inputs, description.layers
    head = description.head if description.tied_embeddings else None
    return ModelParts(
        shapes={**description.shapes, **_of_score_head(description)},
        tables={description.embedding, *(() if inputs is None else (inputs.embedding,))},
        linear_layers=[layer for layer in description.linear_layers if layer is not head],
        qkv=[layer.attention.qkv for layer in layers],
        heads=[(layer.attention.num_heads, layer.attention.num_kv_heads) for layer in layers],
        offsets={norm.tensor: norm.weight_offset for norm in description.norms if norm.weight_offset},
        unused_prefixes=description.unused_prefixes,
        prefix=_OF_ENCODERS if description.is_encoder else "",
    )


def _of_encoder(description: EncoderDescription) -> ModelParts:
    hidden, layers = description.hidden_size, description.layers
    shapes: dict[str, tuple[int, ...]] = {description.word_embedding: (description.vocab_size, hidden)}
    if description.position_embedding is not None:
        num_positions = description.first_position + description.context_length
        shapes[description.position_embedding] = (num_positions, hidden)
    if description.type_embedding is not None:
        shapes[description.type_embedding] = (description.num_types, hidden)
    shapes |= _of_score_head(description)
    for norm in description.norms:
        shapes |= {f"{norm.name}.{kind}": (norm.size,) for kind in ("weight", "bias")}
    return ModelParts(
        shapes=shapes,
        tables=(),  # encoders read their embeddings as numbers
        linear_layers=[
            linear for layer in layers for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
        ],
        qkv=[layer.qkv for layer in layers],
        heads=[(description.num_heads,) * 2 for _ in layers],
        offsets={},
        unused_prefixes=(),
        prefix=description.word_embedding.removesuffix(_WORDS),
    )


def _of_score_head(description: AnyDescription) -> dict[str, tuple[int, ...]]:
    head, hidden = description.score_head, description.hidden_size
    if head is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {f"{head.output}.weight": (head.num_labels, hidden)}
    if head.bias:
        shapes[f"{head.output}.bias"] = (head.num_labels,)
    if head.dense is not None:
        shapes[f"{head.dense}.weight"] = (hidden, hidden)
        if head.dense_bias:
            shapes[f"{head.dense}.bias"] = (hidden,)
    if (norm := head.norm) is not None:
        shapes |= {name: (norm.size,) for name in (norm.tensor, norm.bias) if name is not None}
    return shapes
