"""The layers of a described model on a GPU: between two matrix products there is one Triton kernel, or two around
attention.

Norms are fused with the additions to the residual stream before them. Where the product that follows takes rows in
codes, norms and activations write them. The sum of products, the hidden state between layers, is float32: rounding it
after each product moves logits by enough to change near choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire_kernels.activation import Activation
from quire_kernels.embed_tokens import embed_tokens
from quire_kernels.paged_attention import unsupported_heads
from quire_kernels.rotary_store import HeadNorm, rotary_store
from quire_kernels.row_norm import RowNorm, add_row_norm, add_row_norm_codes, row_norm
from worker_svc.cache import LayerCache
from worker_svc.errors import UnsupportedModel
from worker_svc.gpu.device_attention import (
    DEFAULT_BACKEND,
    AttentionSetup,
    DeviceAttention,
    PlannedAttention,
    make_device_attention,
)
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.model.building import BuiltBody, BuiltLayer, ExpertWeights
from worker_svc.model.description import MlpKind, ModelDescription, Norm, NormKind, RopeConfig
from worker_svc.model.device_formats import COMPUTED, Quantization
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.rope import inverse_frequencies, layer_ropes, query_factors
from worker_svc.model.support import check_computed, unsupported_reason
from worker_svc.model.triton_experts import TritonExperts, build_triton_experts
from worker_svc.model.triton_latent import (
    LatentDeviceAttention,
    latent_values,
    store_latents,
    unsupported_latents,
)
from worker_svc.model.triton_products import Product, Rows, activated, build_product

_Layer: TypeAlias = BuiltLayer[Product, RowNorm, TritonExperts]


@dataclass(frozen=True, slots=True)
class _Rotation:
    """The rotary positions of layers: float32 [rotated dimensions / 2] radians per position, and a factor."""

    frequencies: Tensor
    attention_factor: float
    query_factors: Tensor | None
    """Of rotated queries, by position: in the model's dtype [context_length, 1, 1]; None: queries stay."""


@dataclass(frozen=True, slots=True)
class TritonBodyBuilder:
    """Makes the GPU's weights of layers from a checkpoint's."""

    deterministic: bool
    quantization: Quantization | None = None
    """The format of linear layers; None: the model's dtype."""

    def linear(self, weights: LinearWeights) -> Product:
        return build_product(weights, self.quantization, deterministic=self.deterministic)

    def experts(self, weights: ExpertWeights) -> TritonExperts:
        return build_triton_experts(weights, self.quantization, deterministic=self.deterministic)

    def norm(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> RowNorm:
        if norm.weight_offset:
            # In float32: 16 bits would round the stored weights to the precision of the sum.
            weight = weight.float() + norm.weight_offset
        return RowNorm(weight, norm.eps, bias, is_centered=norm.kind is NormKind.LAYER)


class AttentionLimits(NamedTuple):
    """What a step has at most."""

    max_step_tokens: int
    max_sequences: int
    context_length: int


class TritonBody:
    """A model's weights up to the last norm, on its device."""

    def __init__(self, description: ModelDescription, built: BuiltBody[Product, RowNorm, TritonExperts]) -> None:
        self.dtype = built.embedding.dtype
        self._embedding, self._positions, self._norm = built.embedding, built.positions, built.norm
        self._layers = list(zip(built.layers, _rotations(description, self.dtype, self.device), strict=True))
        self._embedding_scale = None if built.embedding_scale == 1.0 else built.embedding_scale

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def __call__(
        self,
        inputs: ForwardInputs,
        sampled: Tensor,
        caches: Sequence[LayerCache],
        attend: PlannedAttention,
        *,
        stores_only: bool = False,
    ) -> Tensor:
        """The states after the last norm of the tokens of `inputs.logits_indices`, or of all [num_rows, hidden_size].

        Keys and values of each layer are stored in its cache before its attention is computed. With `stores_only`
        nothing follows the last ones, and there are no rows.
        """
        hidden = embed_tokens(
            inputs.token_ids,
            sampled,
            self._embedding,
            scale=self._embedding_scale,
            positions=inputs.positions,
            position_embedding=self._positions,
        )
        # Normalised by its own norm, if there is one, and added to `hidden` by the next norm
        update: Tensor | None = None
        update_norm: RowNorm | None = None
        for number, ((layer, rotation), cache) in enumerate(zip(self._layers, caches, strict=True)):
            normed = self._norm_for(layer.qkv, hidden, update, layer.attention_norm, update_norm)
            query = _rotate_and_store(layer, rotation, normed, cache, inputs)
            is_last = number == len(self._layers) - 1
            if is_last and stores_only:
                return hidden[:0]
            gathered = attend(number, query) if layer.sinks is None else attend(number, query, layer.sinks)
            if layer.latent is not None:
                gathered = latent_values(layer.latent, gathered)
            # After the last layer's keys and values, only the tokens of `logits_indices` matter.
            if is_last and inputs.logits_indices is not None:
                gathered, hidden = (rows.index_select(0, inputs.logits_indices) for rows in (gathered, hidden))
            normed = self._norm_for(
                layer.mlp if isinstance(layer.mlp, TritonExperts) else layer.mlp.gate_up,
                hidden,
                layer.output(gathered.flatten(1)),
                layer.mlp_norm,
                layer.post_attention_norm,
                norm_first=layer.spec.parallel,
            )
            update, update_norm = _compute_mlp(layer, normed), layer.post_mlp_norm
        return add_row_norm(hidden, update, self._norm, self.dtype, update_norm=update_norm)

    def _norm_for(
        self,
        product: Product | TritonExperts,
        hidden: Tensor,
        update: Tensor | None,
        norm: RowNorm | None,
        update_norm: RowNorm | None,
        *,
        norm_first: bool = False,
    ) -> Rows:
        """`add_row_norm`, in codes if the product that follows takes them."""
        coding = None if isinstance(product, TritonExperts) else product.coding
        if coding is not None:
            return add_row_norm_codes(hidden, update, norm, coding, update_norm=update_norm, norm_first=norm_first)
        return add_row_norm(hidden, update, norm, self.dtype, update_norm=update_norm, norm_first=norm_first)


def refused_part(description: ModelDescription) -> str | None:
    """What of a description the kernels do not compute; None: they compute all of it."""
    return unsupported_reason(description, COMPUTED) or _refused_heads(description)


def check_description(description: ModelDescription) -> None:
    """Raises UnsupportedModel, which names what the kernels do not compute."""
    check_computed("the Triton kernels", description, COMPUTED)
    if (refused := _refused_heads(description)) is not None:
        raise UnsupportedModel(f"the Triton kernels do not compute {refused}")


def make_attention(
    description: ModelDescription,
    dtype: torch.dtype,
    caches: Sequence[LayerCache],
    limits: AttentionLimits,
    backend: str = DEFAULT_BACKEND,
    *,
    deterministic: bool,
) -> DeviceAttention:
    """The attention of all layers. Raises StartupFailed if the backend does not support it."""
    heads, keys = description.layers[0].attention, caches[0].keys
    setup = AttentionSetup(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        keys.shape[2],
        dtype,
        keys.dtype,
        keys.device,
        description.layout.layers,
        *limits,
        deterministic,
    )
    if heads.latent is not None:
        return LatentDeviceAttention(heads.latent, setup, caches)
    return make_device_attention(backend, setup, caches)


def _refused_heads(description: ModelDescription) -> str | None:
    # Rows of the cache of latent attention are wider than heads, and have limits of their own.
    is_latent = description.layout.keys_hold_values
    return unsupported_latents(description) if is_latent else unsupported_heads(description.layout.head_dim)


def _rotations(description: ModelDescription, dtype: torch.dtype, device: torch.device) -> list[_Rotation | None]:
    """The rotary positions of each layer; layers with the same ones share frequencies."""
    ropes, head_dim = layer_ropes(description), description.layout.head_dim
    rotations = [
        _Rotation(
            inverse_frequencies(rope, head_dim).to(device),
            rope.attention_factor,
            _query_factors(rope, description.context_length, dtype, device),
        )
        for rope in ropes.distinct
    ]
    return [None if index is None else rotations[index] for index in ropes.of_layers]


def _query_factors(rope: RopeConfig, context_length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """By position [context_length, 1, 1]; None: queries stay."""
    factors = query_factors(rope, torch.arange(context_length))
    return None if factors is None else factors[:, None, None].to(device, dtype)


def _rotate_and_store(
    layer: _Layer, rotation: _Rotation | None, normed: Rows, cache: LayerCache, inputs: ForwardInputs
) -> Tensor:
    """The rotated queries [num_tokens, num_heads, head_dim] of a layer; keys and values are stored in its cache."""
    qkv = layer.qkv(normed)
    if layer.latent is not None:
        assert rotation is not None
        factor = rotation.attention_factor
        return store_latents(layer.spec.attention, layer.latent, qkv, rotation.frequencies, factor, cache, inputs)
    if layer.spec.attention.has_joint_norms:
        _normalize_jointly(layer, qkv)
    query = rotary_store(
        qkv,
        inputs.positions,
        None if rotation is None else rotation.frequencies,
        cache.keys,
        cache.values,
        inputs.slots,
        attention_factor=1.0 if rotation is None else rotation.attention_factor,
        norm=_head_norm(layer),
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
    )
    if rotation is not None and rotation.query_factors is not None:
        query *= rotation.query_factors[inputs.positions]
    return query


def _head_norm(layer: _Layer) -> HeadNorm | None:
    query, key = layer.query_norm, layer.key_norm
    if query is None or key is None or layer.spec.attention.has_joint_norms:
        return None
    after = layer.spec.attention.norms_after_rotation
    return HeadNorm(query.weight, key.weight, query.epsilon, key.epsilon, after)


def _normalize_jointly(layer: _Layer, qkv: Tensor) -> None:
    """Normalises all queries together, and all keys, in place."""
    queries, keys, _ = layer.spec.attention.qkv.outputs
    for norm, columns in ((layer.query_norm, slice(0, queries)), (layer.key_norm, slice(queries, queries + keys))):
        if norm is not None:
            qkv[:, columns] = row_norm(qkv[:, columns], norm, qkv.dtype)


def _compute_mlp(layer: _Layer, normed: Rows) -> Tensor:
    """The output of a layer's MLP [num_tokens, hidden_size], which is not yet added to the residual stream."""
    mlp = layer.mlp
    if isinstance(mlp, TritonExperts):
        assert isinstance(normed, Tensor)
        return mlp(normed)
    activation, is_gated = Activation(mlp.spec.activation.value), mlp.spec.kind is MlpKind.GATED
    return mlp.down(activated(mlp.gate_up(normed), activation, mlp.down.coding, is_gated=is_gated))
