"""The layers of a described model on a GPU: between two matrix products there is one Triton kernel, or two around
attention.

Norms are fused with the additions to the residual stream before them. Where the product that follows takes rows in
codes, norms and activations write them. The sum of products, the hidden state between layers, is float32: rounding it
after each product moves logits by enough to change near choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire_kernels.activation import Activation
from quire_kernels.embed_tokens import embed_tokens
from quire_kernels.layer_vectors import layer_vectors
from quire_kernels.paged_attention import unsupported_heads
from quire_kernels.rotary_store import HeadNorm, rotary_store
from quire_kernels.rotate_queries import rotate_queries
from quire_kernels.row_norm import RowNorm, add_row_norm, add_row_norm_codes, row_norm
from worker_svc.cache import LayerCache
from worker_svc.errors import UnsupportedModel
from worker_svc.gpu.attention_by_heads import AttentionByHeads
from worker_svc.gpu.device_attention import (
    DEFAULT_BACKEND,
    AttentionSetup,
    DeviceAttention,
    PlannedAttention,
    make_device_attention,
)
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.model.building import BuiltBeside, BuiltBody, BuiltLayer, BuiltLayerInput, BuiltMlp, ExpertWeights
from worker_svc.model.description import MlpKind, ModelDescription, Norm, NormKind, RopeConfig
from worker_svc.model.device_formats import COMPUTED, Quantization
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.rope import layer_ropes, query_factors_of_context
from worker_svc.model.support import check_computed, unsupported_reason
from worker_svc.model.triton_experts import TritonExperts, build_triton_experts
from worker_svc.model.triton_latent import (
    LatentDeviceAttention,
    latent_values,
    store_latents,
    unsupported_latents,
)
from worker_svc.model.triton_products import Product, Rows, activated, activated_product, build_product

_Layer: TypeAlias = BuiltLayer[Product, RowNorm, TritonExperts]


@dataclass(frozen=True, slots=True)
class _Rotation:
    """The rotary positions of layers: float32 [rotated dimensions / 2] radians per position, and a factor."""

    frequencies: Tensor
    attention_factor: float
    query_factors: Tensor | None
    """Of rotated queries, by position: in the model's dtype [context_length, 1, 1]; None: queries stay."""


class _Update(NamedTuple):
    """What is added to the hidden states, after its own norm if there is one, and what the sum is multiplied by."""

    rows: Tensor | None = None
    norm: RowNorm | None = None
    sum_scale: float | None = None
    """None: 1."""


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
        if norm.weight_offset or norm.weight_factor != 1.0:
            weight = norm.weight_of(weight)
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
        self._inputs = built.layer_inputs
        self._last_to_store = max(n for n, one in enumerate(built.layers) if one.spec.attention.shared_layer is None)

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

        Keys and values of each layer that has some are stored in its cache before its attention is computed. With
        `stores_only` nothing follows the last ones, and there are no rows.
        """
        hidden = embed_tokens(
            inputs.token_ids,
            sampled,
            self._embedding,
            scale=self._embedding_scale,
            positions=inputs.positions,
            position_embedding=self._positions,
        )
        vectors = self._layer_vectors(inputs.token_ids, sampled, hidden)
        # Added to `hidden` by the next norm
        update = _Update()
        for number, ((layer, rotation), cache) in enumerate(zip(self._layers, caches, strict=True)):
            normed = self._norm_for(layer.qkv, hidden, update, layer.attention_norm)
            query = _rotate_and_store(layer, rotation, normed, cache, inputs)
            if number == self._last_to_store and stores_only:
                return hidden[:0]
            gathered = attend(number, query) if layer.sinks is None else attend(number, query, layer.sinks)
            if layer.latent is not None:
                gathered = latent_values(layer.latent, gathered)
            own = None if vectors is None else vectors[:, number]
            # After the last layer's keys and values, only the tokens of `logits_indices` matter.
            if number == len(self._layers) - 1 and (indices := inputs.logits_indices) is not None:
                gathered, hidden = (rows.index_select(0, indices) for rows in (gathered, hidden))
                own = None if own is None else own.index_select(0, indices)
            update = self._after_attention(layer, hidden, gathered, own)
        rows, update_norm, sum_scale = update
        return add_row_norm(hidden, rows, self._norm, self.dtype, update_norm=update_norm, sum_scale=sum_scale)

    def _after_attention(self, layer: _Layer, hidden: Tensor, gathered: Tensor, own: Tensor | None) -> _Update:
        """What is left to add at the end of a layer, given what its attention returned [num_tokens, num_heads,
        head_dim], and its own vectors [num_tokens, width] if it has some; all else is added to `hidden`.
        """
        update = _Update(layer.output(gathered.flatten(1)), layer.post_attention_norm)
        update = _Update(self._feed_forward(layer, hidden, update), layer.post_mlp_norm)
        if layer.input is not None and own is not None:
            gate = layer.input.gate(self._norm_for(layer.input.gate, hidden, update, None))
            update = _Update(_compute_input(layer.input, gate, own), layer.input.norm)
        return update if layer.scale == 1.0 else update._replace(sum_scale=layer.scale)

    def _feed_forward(self, layer: _Layer, hidden: Tensor, update: _Update) -> Tensor:
        """What a layer's MLP returns, its experts, or both [num_tokens, hidden_size], after the update of attention."""
        if layer.beside is not None:
            return self._both(layer, layer.beside, hidden, update)
        product = layer.mlp if isinstance(layer.mlp, TritonExperts) else layer.mlp.gate_up
        normed = self._norm_for(product, hidden, update, layer.mlp_norm, norm_first=layer.spec.parallel)
        if isinstance(layer.mlp, TritonExperts):
            assert isinstance(normed, Tensor)
            return layer.mlp(normed)
        return _compute_mlp(layer.mlp, normed)

    def _both(self, layer: _Layer, beside: BuiltBeside[Product, RowNorm], hidden: Tensor, update: _Update) -> Tensor:
        """What experts and the MLP beside them return, float32."""
        assert isinstance(layer.mlp, TritonExperts)
        assert layer.mlp_norm is not None
        dense = _compute_mlp(beside.mlp, self._norm_for(beside.mlp.gate_up, hidden, update, beside.norm))
        normed, scored = (row_norm(hidden, norm, self.dtype) for norm in (layer.mlp_norm, beside.router_norm))
        mixed = row_norm(layer.mlp(normed, scored), beside.experts_post_norm, torch.float32)
        add_row_norm(mixed, dense, None, update_norm=beside.post_norm)
        return mixed

    def _layer_vectors(self, token_ids: Tensor, sampled: Tensor, hidden: Tensor) -> Tensor | None:
        """The layers' own vectors [num_tokens, num_layers, width]; None: they have none."""
        if (inputs := self._inputs) is None:
            return None
        projected = inputs.projection(self._norm_for(inputs.projection, hidden, _Update(), None))
        scales = {"embedding_scale": inputs.embedding_scale, "scale": inputs.spec.scale}
        return layer_vectors(token_ids, sampled, inputs.embedding, projected, inputs.norm, **scales)

    def _norm_for(
        self,
        product: Product | TritonExperts,
        hidden: Tensor,
        update: _Update,
        norm: RowNorm | None,
        *,
        norm_first: bool = False,
    ) -> Rows:
        """`add_row_norm`, in codes if the product that follows takes them."""
        rows, update_norm, sum_scale = update
        how: dict[str, Any] = {"update_norm": update_norm, "norm_first": norm_first, "sum_scale": sum_scale}
        coding = None if isinstance(product, TritonExperts) else product.coding
        if coding is not None:
            return add_row_norm_codes(hidden, rows, norm, coding, **how)
        return add_row_norm(hidden, rows, norm, self.dtype, **how)


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

    def make(layers: Sequence[int]) -> DeviceAttention:
        heads, keys = description.layers[layers[0]].attention, caches[layers[0]].keys
        of_layers = [caches[layer] for layer in layers]
        setup = AttentionSetup(
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            keys.shape[2],
            dtype,
            keys.dtype,
            keys.device,
            tuple(description.layout.layers[layer] for layer in layers),
            *limits,
            deterministic,
        )
        if heads.latent is not None:
            return LatentDeviceAttention(heads.latent, setup, of_layers)
        return make_device_attention(backend, setup, of_layers)

    groups = _layers_by_heads(description)
    return make(groups[0]) if len(groups) == 1 else AttentionByHeads({layers: make(layers) for layers in groups})


def _layers_by_heads(description: ModelDescription) -> list[tuple[int, ...]]:
    """The numbers of the layers of each shape of heads."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, layer in enumerate(description.layers):
        heads = layer.attention
        rank = 0 if heads.latent is None else heads.latent.rank
        groups.setdefault((heads.num_heads, heads.num_kv_heads, heads.head_dim, rank), []).append(number)
    return list(map(tuple, groups.values()))


def _refused_heads(description: ModelDescription) -> str | None:
    # Rows of the cache of latent attention are wider than heads, and have limits of their own.
    is_latent = description.layout.keys_hold_values
    return unsupported_latents(description) if is_latent else unsupported_heads(*description.layout.head_dims)


def _rotations(description: ModelDescription, dtype: torch.dtype, device: torch.device) -> list[_Rotation | None]:
    """The rotary positions of each layer; layers with the same ones share frequencies."""
    ropes = layer_ropes(description)
    rotations = [
        _Rotation(
            rope.frequencies().to(device),
            rope.config.attention_factor,
            _query_factors(rope.config, description.context_length, dtype, device),
        )
        for rope in ropes.distinct
    ]
    return [None if index is None else rotations[index] for index in ropes.of_layers]


def _query_factors(rope: RopeConfig, context_length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """By position [context_length, 1, 1]; None: queries stay."""
    factors = query_factors_of_context(rope, context_length)
    return None if factors is None else factors[:, None, None].to(device, dtype)


def _rotate_and_store(
    layer: _Layer, rotation: _Rotation | None, normed: Rows, cache: LayerCache, inputs: ForwardInputs
) -> Tensor:
    """The rotated queries [num_tokens, num_heads, head_dim] of a layer; its keys and values, if it has some, are stored
    in its cache.
    """
    spec, qkv = layer.spec.attention, layer.qkv(normed)
    frequencies, factor = (None, 1.0) if rotation is None else (rotation.frequencies, rotation.attention_factor)
    if layer.latent is not None:
        assert frequencies is not None
        return store_latents(spec, layer.latent, qkv, frequencies, factor, cache, inputs)
    if spec.has_joint_norms:
        _normalize_jointly(layer, qkv)
    if spec.shared_layer is not None:
        query = rotate_queries(
            qkv,
            inputs.positions,
            frequencies,
            spec.head_dim,
            attention_factor=factor,
            norm=None if spec.has_joint_norms else layer.query_norm,
            norm_after_rotation=spec.norms_after_rotation,
        )
    else:
        query = rotary_store(
            qkv,
            inputs.positions,
            frequencies,
            cache.keys,
            cache.values,
            inputs.slots,
            attention_factor=factor,
            norm=_head_norm(layer),
            value_epsilon=spec.value_norm_eps,
            values_are_keys=spec.values_are_keys,
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
    queries, *others = layer.spec.attention.qkv.outputs
    keys = slice(queries, queries + sum(others[:1]))
    for norm, columns in ((layer.query_norm, slice(0, queries)), (layer.key_norm, keys)):
        if norm is not None:
            qkv[:, columns] = row_norm(qkv[:, columns], norm, qkv.dtype)


def _compute_mlp(mlp: BuiltMlp[Product], normed: Rows) -> Tensor:
    """The output of an MLP [num_tokens, hidden_size], which is not yet added to the residual stream."""
    activation, is_gated = Activation(mlp.spec.activation.value), mlp.spec.kind is MlpKind.GATED
    return mlp.down(activated(mlp.gate_up(normed), activation, mlp.down.coding, is_gated=is_gated))


def _compute_input(layer: BuiltLayerInput[Product, RowNorm], gate: Tensor, vectors: Tensor) -> Tensor:
    """What a layer makes of its own vectors [num_tokens, width], [num_tokens, hidden_size], which is not yet added."""
    activation = Activation(layer.spec.activation.value)
    return layer.up(activated_product(gate, vectors, activation, layer.up.coding))
