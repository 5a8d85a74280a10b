"""A described model on a GPU: between two matrix products there is one Triton kernel, or two around attention.

Norms are fused with the additions to the residual stream before them. Products are torch's, in the model's dtype, or
Quire's own in deterministic mode. Their sum, the hidden state between layers, is float32: rounding it after each
product moves logits by enough to change near choices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire_kernels.activation import Activation, gated_activation, plain_activation
from quire_kernels.embed_tokens import embed_tokens
from quire_kernels.invariant_linear import invariant_linear
from quire_kernels.logits_epilogue import logits_epilogue
from quire_kernels.paged_attention import unsupported_heads
from quire_kernels.rotary_store import HeadNorm, rotary_store
from quire_kernels.row_norm import RowNorm, add_row_norm, row_norm
from worker_svc.cache import KVCache, LayerCache
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor
from worker_svc.gpu.device_attention import (
    DEFAULT_BACKEND,
    AttentionSetup,
    DeviceAttention,
    make_device_attention,
)
from worker_svc.gpu.executor import DeviceExecutor
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.model.building import BuiltLayer, ExpertWeights, build
from worker_svc.model.config import UnsupportedModel
from worker_svc.model.description import MlpKind, ModelDescription, Norm, NormKind
from worker_svc.model.linear_weights import LinearWeights, WeightParts
from worker_svc.model.rope import inverse_frequencies, layer_ropes
from worker_svc.model.support import BY_EVERY_BACKEND, Feature, check_computed
from worker_svc.model.triton_experts import TritonExperts, build_triton_experts
from worker_svc.model.triton_latent import LatentDeviceAttention, latent_values, store_latents, unsupported_latents
from worker_svc.model.weight_format import format_of
from worker_svc.model.weights import Checkpoint
from worker_svc.model_layout import ModelLayout

COMPUTED = BY_EVERY_BACKEND | {Feature.EXPERT_GROUPS, Feature.LATENT_ATTENTION, Feature.SIGMOID_ROUTER}

Multiply: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class _Product:
    """A linear map [num_tokens, inputs] to [num_tokens, outputs]."""

    weight: Tensor
    bias: Tensor | None
    multiply: Multiply

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.multiply(inputs, self.weight, self.bias)


_Layer: TypeAlias = BuiltLayer[_Product, RowNorm, TritonExperts]


@dataclass(frozen=True, slots=True)
class _Rotation:
    """The rotary positions of layers: float32 [rotated dimensions / 2] radians per position, and a factor."""

    frequencies: Tensor
    attention_factor: float


@dataclass(frozen=True, slots=True)
class _DeviceHead:
    """The head's weight [vocab_size, hidden_size] and its bias [vocab_size]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _TritonBuilder:
    """Makes the GPU's weights from a checkpoint's."""

    deterministic: bool

    def linear(self, weights: LinearWeights) -> _Product:
        return _Product(*weights.fused(), invariant_linear if self.deterministic else F.linear)

    def experts(self, weights: ExpertWeights) -> TritonExperts:
        return build_triton_experts(weights, deterministic=self.deterministic)

    def norm(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> RowNorm:
        if norm.weight_offset:
            # In float32: 16 bits would round the stored weights to the precision of the sum.
            weight = weight.float() + norm.weight_offset
        return RowNorm(weight, norm.eps, bias, is_centered=norm.kind is NormKind.LAYER)

    def head(self, weights: WeightParts) -> _DeviceHead:
        return _DeviceHead(*weights.fused())


class TritonModel:
    """A model's weights on its device. With `deterministic`, a token's bits do not depend on other tokens of the
    step. Executors compute attention by the backend of the name `attention_backend`.
    """

    def __init__(
        self,
        description: ModelDescription,
        checkpoint: Checkpoint,
        *,
        deterministic: bool = False,
        attention_backend: str = DEFAULT_BACKEND,
    ) -> None:
        """Raises UnsupportedModel if the description is not supported, or tensors do not match it."""
        check_computed("the Triton kernels", description, COMPUTED)
        layout = description.layout
        # Rows of the cache of latent attention are wider than heads, and have limits of their own.
        is_latent = layout.keys_hold_values
        refused = unsupported_latents(description) if is_latent else unsupported_heads(layout.head_dim)
        if is_latent and attention_backend != DEFAULT_BACKEND:
            refused = f"latent attention by QUIRE_ATTENTION_BACKEND {attention_backend}"
        if refused is not None:
            raise UnsupportedModel(f"the Triton kernels do not compute {refused}")
        self.description = description
        self.deterministic, self.attention_backend = deterministic, attention_backend
        built = build(description, checkpoint, _TritonBuilder(deterministic))
        self.embedding, self.position_embedding = built.embedding, built.positions
        self.layers, self.norm, self.head = built.layers, built.norm, built.head
        self.rotations = _rotations(description, built.embedding.device)
        """Of each layer; None: it has no rotary positions."""
        scale = description.embedding_scale
        self.embedding_scale: float | None = None
        if scale != 1.0:
            self.embedding_scale = torch.tensor(scale, dtype=built.embedding.dtype).item()

    @property
    def layout(self) -> ModelLayout:
        return self.description.layout

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        forward = TritonForward(self, cache, limits)
        return DeviceExecutor(forward, limits, cache.device, cuda_graphs=graphs.enabled, report=graphs.report)


def load_triton_model(
    description: ModelDescription,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
    attention_backend: str = DEFAULT_BACKEND,
) -> TritonModel:
    """Loads the model of a directory. Raises UnsupportedModel if it is not supported, or its tensors do not match."""
    with torch.inference_mode(), Checkpoint(directory, format_of(directory), dtype, device) as checkpoint:
        model = TritonModel(description, checkpoint, deterministic=deterministic, attention_backend=attention_backend)
        checkpoint.check_all_taken()
        return model


class TritonForward:
    """A `worker_svc.gpu.forward_graphs.DeviceForward`: the model over its cache."""

    def __init__(self, model: TritonModel, cache: KVCache, limits: WorkerLimits) -> None:
        self._model = model
        caches = [cache.layer(layer) for layer in range(cache.num_layers)]
        self._dtype = model.embedding.dtype
        self._layers = list(zip(model.layers, model.rotations, caches, strict=True))
        self.attention = _make_attention(model, cache, caches, limits)

    def __call__(self, inputs: ForwardInputs, sampled: Tensor, logits: Tensor) -> None:
        model = self._model
        hidden = embed_tokens(
            inputs.token_ids,
            sampled,
            model.embedding,
            scale=model.embedding_scale,
            positions=inputs.positions,
            position_embedding=model.position_embedding,
        )
        # Normalised by its own norm, if there is one, and added to `hidden` by the next norm
        update: Tensor | None = None
        update_norm: RowNorm | None = None
        attend = self.attention.attend(inputs)
        for number, (layer, rotation, cache) in enumerate(self._layers):
            normed = add_row_norm(hidden, update, layer.attention_norm, self._dtype, update_norm=update_norm)
            query = _rotate_and_store(layer, rotation, normed, cache, inputs)
            is_last = number == len(self._layers) - 1
            # After the last layer's keys and values, only tokens followed by a sampled token matter.
            if is_last and not len(logits):
                return
            gathered = attend(number, query)
            if layer.latent is not None:
                gathered = latent_values(layer.latent, gathered)
            if is_last and inputs.logits_indices is not None:
                gathered, hidden = (rows.index_select(0, inputs.logits_indices) for rows in (gathered, hidden))
            normed = add_row_norm(
                hidden,
                layer.output(gathered.flatten(1)),
                layer.mlp_norm,
                self._dtype,
                update_norm=layer.post_attention_norm,
                norm_first=layer.spec.parallel,
            )
            update, update_norm = _compute_mlp(layer, normed), layer.post_mlp_norm
        normed = add_row_norm(hidden, update, model.norm, self._dtype, update_norm=update_norm)
        self._compute_logits(normed, logits)

    def _compute_logits(self, normed: Tensor, logits: Tensor) -> None:
        """The last product is returned in float32: logits of about 25 are 0.125 apart in bfloat16, which makes many
        ties.
        """
        head = self._model.head
        if self._model.deterministic:
            invariant_linear(normed, head.weight, out=logits)
        elif normed.dtype == torch.float32:
            torch.mm(normed, head.weight.t(), out=logits)
        else:
            torch.mm(normed, head.weight.t(), out_dtype=torch.float32, out=logits)
        logits_epilogue(logits, head.bias, self._model.description.logits_soft_cap)


def _rotations(description: ModelDescription, device: torch.device) -> list[_Rotation | None]:
    """The rotary positions of each layer; layers with the same ones share frequencies."""
    ropes, head_dim = layer_ropes(description), description.layout.head_dim
    rotations = [
        _Rotation(inverse_frequencies(rope, head_dim).to(device), rope.attention_factor) for rope in ropes.distinct
    ]
    return [None if index is None else rotations[index] for index in ropes.of_layers]


def _rotate_and_store(
    layer: _Layer, rotation: _Rotation | None, normed: Tensor, cache: LayerCache, inputs: ForwardInputs
) -> Tensor:
    """The rotated queries [num_tokens, num_heads, head_dim] of a layer; keys and values are stored in its cache."""
    qkv = layer.qkv(normed)
    if layer.latent is not None:
        assert rotation is not None
        factor = rotation.attention_factor
        return store_latents(layer.spec.attention, layer.latent, qkv, rotation.frequencies, factor, cache, inputs)
    if layer.spec.attention.has_joint_norms:
        _normalize_jointly(layer, qkv)
    return rotary_store(
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


def _head_norm(layer: _Layer) -> HeadNorm | None:
    query, key = layer.query_norm, layer.key_norm
    if query is None or key is None or layer.spec.attention.has_joint_norms:
        return None
    return HeadNorm(query.weight, key.weight, query.epsilon, key.epsilon)


def _normalize_jointly(layer: _Layer, qkv: Tensor) -> None:
    """Normalises all queries together, and all keys, in place."""
    queries, keys, _ = layer.spec.attention.qkv.outputs
    for norm, columns in ((layer.query_norm, slice(0, queries)), (layer.key_norm, slice(queries, queries + keys))):
        if norm is not None:
            qkv[:, columns] = row_norm(qkv[:, columns], norm, qkv.dtype)


def _compute_mlp(layer: _Layer, normed: Tensor) -> Tensor:
    """The output of a layer's MLP [num_tokens, hidden_size], which is not yet added to the residual stream."""
    mlp = layer.mlp
    if isinstance(mlp, TritonExperts):
        return mlp(normed)
    activate = gated_activation if mlp.spec.kind is MlpKind.GATED else plain_activation
    return mlp.down(activate(mlp.gate_up(normed), Activation(mlp.spec.activation.value)))


def _make_attention(
    model: TritonModel, cache: KVCache, caches: Sequence[LayerCache], limits: WorkerLimits
) -> DeviceAttention:
    """The attention of all layers. Raises StartupFailed if the backend does not support it."""
    heads = model.description.layers[0].attention
    setup = AttentionSetup(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        cache.block_size,
        model.embedding.dtype,
        cache.values.dtype,
        cache.device,
        model.layout.layers,
        limits.max_step_tokens,
        limits.max_sequences,
        limits.context_length,
        model.deterministic,
    )
    if heads.latent is not None:
        return LatentDeviceAttention(heads.latent, setup, caches)
    return make_device_attention(model.attention_backend, setup, caches)
