"""Which descriptions a backend supports. It rejects everything else by name.

Every backend supports a stack of equal layers: RMS norms of one epsilon, rotary positions, grouped queries over KV
heads, a gated MLP with SiLU. Anything beyond that is a `Feature`, and a backend lists the features that it supports.
"""

from collections.abc import Iterator
from enum import Enum, auto

from worker_svc.errors import UnsupportedModel
from worker_svc.model.description import (
    Activation,
    ComputedFormat,
    ExpertScores,
    ExpertsSpec,
    MlpKind,
    ModelDescription,
    NormKind,
)


class Feature(Enum):
    """A property of a description that not every backend supports."""

    LAYER_NORM = auto()
    NORM_WEIGHT_OFFSET = auto()
    NORM_EPSILONS = auto()
    SOFT_CAP = auto()
    NO_POSITIONS = auto()
    ROPE_PER_LAYER = auto()
    HEADS_PER_LAYER = auto()
    SINGLE_HEAD_NORM = auto()
    HEAD_LAYER_NORM = auto()
    PLAIN_MLP = auto()
    ACTIVATION = auto()
    MLP_WIDTH_PER_LAYER = auto()
    INT8_WEIGHTS = auto()
    INT4_WEIGHTS = auto()
    KV_FORMAT = auto()
    HEAD_BIAS = auto()
    PARTIAL_ROTATION = auto()
    POSITION_EMBEDDING = auto()
    EMBEDDING_SCALE = auto()
    POST_NORMS = auto()
    PARALLEL_LAYERS = auto()
    LOGITS_SOFT_CAP = auto()
    LOGITS_SCALE = auto()
    EXPERTS = auto()
    JOINT_HEAD_NORM = auto()
    LATENT_ATTENTION = auto()
    LATENT_PER_LAYER = auto()
    EXPERT_GROUPS = auto()
    SIGMOID_ROUTER = auto()
    BIDIRECTIONAL = auto()
    NO_INPUT_NORMS = auto()
    NORMS_AFTER_ROTATION = auto()
    SINKS = auto()
    EXPERT_BIASES = auto()
    VALUE_NORM = auto()
    VALUES_OF_KEYS = auto()
    SHARED_KV = auto()
    LAYER_INPUTS = auto()
    LAYER_SCALE = auto()
    MLP_BESIDE_EXPERTS = auto()
    EXPERT_WEIGHT_SCALES = auto()


BY_EVERY_BACKEND = frozenset(
    {
        Feature.ACTIVATION,
        Feature.EMBEDDING_SCALE,
        Feature.EXPERTS,
        Feature.EXPERT_BIASES,
        Feature.EXPERT_WEIGHT_SCALES,
        Feature.HEADS_PER_LAYER,
        Feature.HEAD_BIAS,
        Feature.JOINT_HEAD_NORM,
        Feature.LAYER_INPUTS,
        Feature.LAYER_NORM,
        Feature.LAYER_SCALE,
        Feature.LOGITS_SCALE,
        Feature.LOGITS_SOFT_CAP,
        Feature.MLP_BESIDE_EXPERTS,
        Feature.MLP_WIDTH_PER_LAYER,
        Feature.NORMS_AFTER_ROTATION,
        Feature.NORM_EPSILONS,
        Feature.NORM_WEIGHT_OFFSET,
        Feature.NO_INPUT_NORMS,
        Feature.NO_POSITIONS,
        Feature.PARALLEL_LAYERS,
        Feature.PARTIAL_ROTATION,
        Feature.PLAIN_MLP,
        Feature.POSITION_EMBEDDING,
        Feature.POST_NORMS,
        Feature.ROPE_PER_LAYER,
        Feature.SHARED_KV,
        Feature.SINKS,
        Feature.SOFT_CAP,
        Feature.VALUES_OF_KEYS,
        Feature.VALUE_NORM,
    }
)
"""The features that torch's operators, the compiled code and the Triton kernels all compute."""


def features(description: ModelDescription) -> Iterator[tuple[Feature, str]]:
    """The features of a description, each with its name for the operator."""
    layers = description.layers
    attentions, mlps = [layer.attention for layer in layers], [mlp for layer in layers for mlp in layer.mlps]
    norms = list(description.norms)
    if any(norm.kind is not NormKind.RMS for norm in norms):
        yield Feature.LAYER_NORM, "layer norms"
    if any(norm.weight_offset for norm in norms):
        yield Feature.NORM_WEIGHT_OFFSET, "norms whose weight has an offset"
    if len({norm.eps for norm in norms}) > 1:
        yield Feature.NORM_EPSILONS, "norms of different epsilons"
    if any(attention.soft_cap is not None for attention in attentions):
        yield Feature.SOFT_CAP, "a soft cap on attention scores"
    if any(attention.rope is None for attention in attentions):
        yield Feature.NO_POSITIONS, "layers without positions"
    if len({attention.rope for attention in attentions}) > 1:
        yield Feature.ROPE_PER_LAYER, "layers of different rotary positions"
    shapes = {(attention.num_heads, attention.num_kv_heads, attention.head_dim) for attention in attentions}
    if len(shapes) > 1:
        named = ", ".join(map(str, sorted(shapes)))
        yield Feature.HEADS_PER_LAYER, f"layers of different shapes (heads, KV heads, dimensions): {named}"
    latents = [attention.latent for attention in attentions]
    if (
        len(
            {
                each and (each.rank, each.plain_dim, each.value_dim, each.query_norm and each.query_norm.size)
                for each in latents
            }
        )
        > 1
    ):
        yield Feature.LATENT_PER_LAYER, "layers of different latent attention"
    with_keys = [attention for attention in attentions if attention.shared_layer is None]
    if any((attention.query_norm is None) != (attention.key_norm is None) for attention in with_keys):
        yield Feature.SINGLE_HEAD_NORM, "norms of queries or keys alone"
    head_norms = [norm for attention in attentions for norm in (attention.query_norm, attention.key_norm) if norm]
    if any(norm.kind is not NormKind.RMS for norm in head_norms):
        yield Feature.HEAD_LAYER_NORM, "layer norms of queries and keys"
    if any(mlp.kind is not MlpKind.GATED for mlp in mlps):
        yield Feature.PLAIN_MLP, "an MLP without a gate"
    for activation in sorted({mlp.activation for mlp in mlps} - {Activation.SILU}):
        yield Feature.ACTIVATION, f"the activation {activation}"
    if len({mlp.width for mlp in mlps}) > 1:
        yield Feature.MLP_WIDTH_PER_LAYER, "MLPs of different widths"
    computed = {linear.computed for linear in description.linear_layers}
    if ComputedFormat.INT8 in computed:
        yield Feature.INT8_WEIGHTS, "linear layers computed in int8"
    if ComputedFormat.W8A8 in computed:
        yield Feature.INT8_WEIGHTS, "linear layers computed in W8A8"
    for each in (ComputedFormat.W4A16, ComputedFormat.W4A8):
        if each in computed:
            yield Feature.INT4_WEIGHTS, f"linear layers computed in {each.name}"
    if any(attention.kv_format is not None for attention in attentions):
        yield Feature.KV_FORMAT, "a format of keys and values for each layer"
    if description.head.biased:
        yield Feature.HEAD_BIAS, "a head with a bias"
    if any(attention.rope is not None and attention.rope.rotated_dims is not None for attention in attentions):
        yield Feature.PARTIAL_ROTATION, "rotary positions of a part of each head"
    if description.positions is not None:
        yield Feature.POSITION_EMBEDDING, "an embedding of positions"
    if description.embedding_scale != 1.0:
        yield Feature.EMBEDDING_SCALE, "a factor of the embedding"
    if any(layer.post_attention_norm or layer.post_mlp_norm for layer in layers):
        yield Feature.POST_NORMS, "norms after attention or MLP"
    if any(layer.parallel for layer in layers):
        yield Feature.PARALLEL_LAYERS, "attention and MLP side by side"
    if description.logits_scale != 1.0:
        yield Feature.LOGITS_SCALE, "a factor of the logits"
    if description.logits_soft_cap is not None:
        yield Feature.LOGITS_SOFT_CAP, "a soft cap on logits"
    mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, ExpertsSpec)]
    if mixtures:
        yield Feature.EXPERTS, "experts"
    of_experts = [linear for each in mixtures for mlp in each.mlps for linear in (each.router, mlp.gate_up, mlp.down)]
    if any(linear.biased for linear in of_experts):
        yield Feature.EXPERT_BIASES, "experts with biases"
    if any(attention.has_joint_norms for attention in attentions):
        yield Feature.JOINT_HEAD_NORM, "norms of all heads together"
    if any(attention.norms_after_rotation for attention in attentions):
        yield Feature.NORMS_AFTER_ROTATION, "norms of queries and keys after rotation"
    if any(attention.latent is not None for attention in attentions):
        yield Feature.LATENT_ATTENTION, "latent attention"
    if any(mixture.groups is not None for mixture in mixtures):
        yield Feature.EXPERT_GROUPS, "experts that are chosen by groups"
    if any(mixture.scores is not ExpertScores.SOFTMAX or mixture.choice_bias for mixture in mixtures):
        yield Feature.SIGMOID_ROUTER, "a router with sigmoids or a bias of the choice"
    if any(layer.attention_norm is None or layer.mlp_norm is None for layer in layers):
        yield Feature.NO_INPUT_NORMS, "layers without a norm before attention or MLP"
    if any(attention.sinks is not None for attention in attentions):
        yield Feature.SINKS, "attention sinks"
    if any(attention.value_norm_eps is not None for attention in attentions):
        yield Feature.VALUE_NORM, "norms of values"
    if any(attention.values_are_keys for attention in attentions):
        yield Feature.VALUES_OF_KEYS, "values that are keys"
    if any(attention.shared_layer is not None for attention in attentions):
        yield Feature.SHARED_KV, "layers that share keys and values"
    if description.layer_inputs is not None:
        yield Feature.LAYER_INPUTS, "vectors of each layer's own"
    if any(layer.scale is not None for layer in layers):
        yield Feature.LAYER_SCALE, "factors of layers"
    if any(layer.beside is not None for layer in layers):
        yield Feature.MLP_BESIDE_EXPERTS, "an MLP beside experts"
    if any(mixture.weight_scales is not None for mixture in mixtures):
        yield Feature.EXPERT_WEIGHT_SCALES, "factors of the weights of experts"
    if description.is_bidirectional:
        yield Feature.BIDIRECTIONAL, "attention to later tokens"


def unsupported_reason(description: ModelDescription, computed: frozenset[Feature]) -> str | None:
    """The first feature of a description that is not in `computed`, by name; None: there is none."""
    names = [name for feature, name in features(description) if feature not in computed]
    return ", ".join(names) or None


def is_native_alone(description: ModelDescription) -> bool:
    """Whether transformers' modules cannot compute the model over a paged cache: they expand latent vectors, and then
    keys and values differ in their dimensions.
    """
    return any(layer.attention.latent is not None for layer in description.layers)


def check_computed(backend: str, description: ModelDescription, computed: frozenset[Feature]) -> None:
    """Raises UnsupportedModel, which names the backend and the unsupported feature."""
    refused = unsupported_reason(description, computed)
    if refused is not None:
        raise UnsupportedModel(f"{backend} do not compute {refused}, which this {description.architecture} model has")
