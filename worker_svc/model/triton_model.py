"""A described model on a GPU: between two matrix products there is one Triton kernel, or two around attention.

Products are torch's, in the model's dtype, or Quire's own in deterministic mode. Their sum, the hidden state between
layers, is float32: rounding it after each product moves logits by enough to change near choices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire_kernels.embed_tokens import embed_tokens
from quire_kernels.gated_activation import Activation, gated_activation
from quire_kernels.invariant_linear import invariant_linear
from quire_kernels.paged_attention import paged_attention
from quire_kernels.paged_decode import paged_decode
from quire_kernels.rms_norm import add_rms_norm
from quire_kernels.rotary_store import HeadNorm, rotary_store
from worker_svc.cache import KVCache, LayerCache
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor
from worker_svc.gpu.executor import DeviceExecutor
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.model.building import BuiltLayer, build
from worker_svc.model.description import LinearLayer, ModelDescription, Norm
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.rope import inverse_frequencies, rope_of
from worker_svc.model.support import Feature, check_computed
from worker_svc.model.weight_format import format_of
from worker_svc.model.weights import Checkpoint
from worker_svc.model_layout import LayerAttention, ModelLayout

COMPUTED = frozenset({Feature.SOFT_CAP, Feature.MLP_WIDTH_PER_LAYER})

Multiply: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class _Product:
    """A linear map [num_tokens, inputs] to [num_tokens, outputs]."""

    weight: Tensor
    bias: Tensor | None
    multiply: Multiply

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.multiply(inputs, self.weight, self.bias)


_Layer: TypeAlias = BuiltLayer[_Product, Tensor]


@dataclass(frozen=True, slots=True)
class _TritonBuilder:
    """Makes the GPU's weights from a checkpoint's."""

    multiply: Multiply

    def linear(self, weights: LinearWeights) -> _Product:
        return _Product(*weights.fused(), self.multiply)

    def norm(self, norm: Norm, weight: Tensor) -> Tensor:
        return weight

    def head(self, layer: LinearLayer, weight: Tensor) -> Tensor:
        return weight


class TritonModel:
    """A model's weights on its device. With `deterministic`, a token's bits do not depend on other tokens of the
    step.
    """

    def __init__(self, description: ModelDescription, checkpoint: Checkpoint, *, deterministic: bool = False) -> None:
        """Raises UnsupportedModel if the description is not supported, or tensors do not match it."""
        check_computed("the Triton kernels", description, COMPUTED)
        self.description = description
        self.deterministic = deterministic
        built = build(description, checkpoint, _TritonBuilder(invariant_linear if deterministic else F.linear))
        self.embedding, self.layers, self.norm, self.head = built.embedding, built.layers, built.norm, built.head
        self.rope = rope_of(description)
        self.frequencies = inverse_frequencies(self.rope, self.layout.head_dim).to(self.embedding.device)

    @property
    def layout(self) -> ModelLayout:
        return self.description.layout

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        forward = TritonForward(self, cache)
        return DeviceExecutor(forward, limits, cache.device, cuda_graphs=graphs.enabled, report=graphs.report)


def load_triton_model(
    description: ModelDescription,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> TritonModel:
    """Loads the model of a directory. Raises UnsupportedModel if it is not supported, or its tensors do not match."""
    with torch.inference_mode(), Checkpoint(directory, format_of(directory), dtype, device) as checkpoint:
        model = TritonModel(description, checkpoint, deterministic=deterministic)
        checkpoint.check_all_taken()
        return model


class TritonForward:
    """A `worker_svc.gpu.executor.DeviceForward`: the model over its cache."""

    def __init__(self, model: TritonModel, cache: KVCache) -> None:
        self._model, self._epsilon = model, model.description.norm.eps
        caches = [cache.layer(layer) for layer in range(cache.num_layers)]
        layout = model.layout
        self._layers = list(zip(model.layers, layout.layers, caches, strict=True))
        self._context_length = layout.context_length

    def __call__(self, inputs: ForwardInputs, sampled: Tensor, logits: Tensor) -> None:
        model = self._model
        hidden = embed_tokens(inputs.token_ids, sampled, model.embedding)
        # Added to `hidden` by the next norm
        update: Tensor | None = None
        for number, (layer, attention, cache) in enumerate(self._layers, start=1):
            normed = add_rms_norm(hidden, update, layer.attention_norm, self._epsilon)
            query = self._rotate_and_store(layer, normed, cache, inputs)
            is_last = number == len(self._layers)
            # After the last layer's keys and values, only tokens followed by a sampled token matter.
            if is_last and not len(logits):
                return
            gathered = _attend(query, cache, attention, inputs, self._context_length, model.deterministic)
            if is_last and inputs.logits_indices is not None:
                gathered, hidden = (rows.index_select(0, inputs.logits_indices) for rows in (gathered, hidden))
            normed = add_rms_norm(hidden, layer.output(gathered.flatten(1)), layer.mlp_norm, self._epsilon)
            update = layer.down(gated_activation(layer.gate_up(normed), Activation.SILU))
        normed = add_rms_norm(hidden, update, model.norm, self._epsilon)
        if model.deterministic:
            invariant_linear(normed, model.head, out=logits)
        else:
            _compute_logits(normed, model.head, logits)

    def _rotate_and_store(self, layer: _Layer, normed: Tensor, cache: LayerCache, inputs: ForwardInputs) -> Tensor:
        """The rotated queries [num_tokens, num_heads, head_dim] of a layer; keys and values are stored in its cache."""
        return rotary_store(
            layer.qkv(normed),
            inputs.positions,
            self._model.frequencies,
            cache.keys,
            cache.values,
            inputs.slots,
            attention_factor=self._model.rope.attention_factor,
            norm=self._head_norm(layer),
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
        )

    def _head_norm(self, layer: _Layer) -> HeadNorm | None:
        if layer.query_norm is None or layer.key_norm is None:
            return None
        return HeadNorm(layer.query_norm, layer.key_norm, self._epsilon)


def _attend(
    query: Tensor,
    cache: LayerCache,
    attention: LayerAttention,
    inputs: ForwardInputs,
    max_context_len: int,
    deterministic: bool,
) -> Tensor:
    """The attention output of each query: for sequences of one token by split contexts, for others by tiles of queries.

    `max_context_len` is the model's, not the batch's: the splits then depend only on what a captured graph knows. With
    `deterministic`, all use tiles of queries, of one size: a token gets the same bits alone and among others of its
    sequence.
    """
    single = 0 if deterministic else inputs.num_single
    gathered = torch.empty_like(query)
    if single:
        paged_decode(
            query[:single],
            cache.keys,
            cache.values,
            inputs.block_tables[:single],
            inputs.context_lens[:single],
            max_context_len,
            attention.scale,
            window=attention.window,
            soft_cap=attention.soft_cap,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            out=gathered[:single],
        )
    if single < len(inputs.context_lens):
        paged_attention(
            query,
            cache.keys,
            cache.values,
            inputs.block_tables[single:],
            inputs.query_starts[single:],
            inputs.context_lens[single:],
            max(inputs.max_query_len, 2) if deterministic else inputs.max_query_len,
            attention.scale,
            window=attention.window,
            soft_cap=attention.soft_cap,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            out=gathered,
        )
    return gathered


def _compute_logits(hidden: Tensor, head: Tensor, logits: Tensor) -> None:
    """The last product, returned in float32: logits of about 25 are 0.125 apart in bfloat16, which makes many ties."""
    if hidden.dtype == torch.float32:
        torch.mm(hidden, head.t(), out=logits)
    else:
        torch.mm(hidden, head.t(), out_dtype=torch.float32, out=logits)
