"""A described model by compiled code on a CPU: one call computes all layers of a step."""

from collections.abc import Callable
from ctypes import pointer
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels.cpu.activations import ActivationCode
from quire_kernels.cpu.amx import amx_input_multiple, has_amx, pack_for_amx
from quire_kernels.cpu.attention import RuleArgs, SequencesArgs, block_stride, check_compiled_support
from quire_kernels.cpu.decoder import Decoder, DecoderLayerArgs, DecoderModelArgs, DecoderStepArgs, MlpArgs, RopeArgs
from quire_kernels.cpu.experts import ExpertScoring, PackedExperts
from quire_kernels.cpu.large_pages import LargePages
from quire_kernels.cpu.latent import PackedLatent
from quire_kernels.cpu.linear import (
    MatrixFormat,
    PackedMatrix,
    pack_grouped_bytes,
    pack_matrix,
    pack_nibbles,
)
from quire_kernels.cpu.nibbles import NibbleWeight, quantize_in_nibbles
from quire_kernels.cpu.norms import NormArgs, NormCode, PackedNorm, pack_norm
from quire_kernels.cpu.sample import top_logprobs
from quire_kernels.cpu.thread_pool import ThreadPool
from worker_svc.attention import CompiledKernels
from worker_svc.batch import Batch
from worker_svc.cache import KVCache
from worker_svc.compiled_sampler import CompiledSampler
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor
from worker_svc.host_thread import HostThreadExecutor
from worker_svc.model.block_weights import read_blocks
from worker_svc.model.building import BuiltLatent, BuiltLayer, BuiltMlp, ExpertWeights, MlpWeights, build
from worker_svc.model.config import UnsupportedModel
from worker_svc.model.description import ComputedFormat, LinearLayer, LinearRole, MlpKind, ModelDescription, Norm
from worker_svc.model.linear_weights import LinearWeights, WeightParts
from worker_svc.model.nibble_weights import read_nibbles
from worker_svc.model.panel_order import GateAndUp, HalfHeads, PanelOrder, join, read_joined
from worker_svc.model.rope import inverse_frequencies, layer_ropes
from worker_svc.model.support import BY_EVERY_BACKEND, Feature, check_computed
from worker_svc.model.weights import Checkpoint, ReadMeter, open_checkpoint
from worker_svc.model_layout import ModelLayout
from worker_svc.page_release import trim_heap

COMPUTED = BY_EVERY_BACKEND | {
    Feature.EXPERT_GROUPS,
    Feature.INT4_WEIGHTS,
    Feature.INT8_WEIGHTS,
    Feature.LATENT_ATTENTION,
    Feature.SIGMOID_ROUTER,
    Feature.SINGLE_HEAD_NORM,
}

_FORMATS = {
    ComputedFormat.MODEL: MatrixFormat.PLAIN,
    ComputedFormat.INT8: MatrixFormat.INT8,
    ComputedFormat.W8A8: MatrixFormat.W8A8,
    ComputedFormat.W4A16: MatrixFormat.W4A16,
    ComputedFormat.W4A8: MatrixFormat.W4A8,
}
IN_NIBBLES = {MatrixFormat.INT8: MatrixFormat.W4A16, MatrixFormat.W8A8: MatrixFormat.W4A8}
"""The formats of layers whose codes have 4 bits in the checkpoint, which are kept, by those that are asked."""
# A head in 4 bits would cost more quality than all layers, and often is the embedding too.
_OF_HEADS = {MatrixFormat.W4A16: MatrixFormat.INT8, MatrixFormat.W4A8: MatrixFormat.W8A8}


class _CompiledBuilder:
    """Lays weights out for the compiled code while they are read."""

    def __init__(self, thread_pool: ThreadPool, dtype: torch.dtype, default: MatrixFormat, *, use_amx: bool) -> None:
        self._thread_pool, self._dtype, self._default = thread_pool, dtype, default
        self._use_amx = use_amx
        self._memory = LargePages()

    def linear(self, weights: LinearWeights) -> PackedMatrix:
        # The C library keeps what the layer before was made of: its tensors are of such sizes.
        trim_heap()
        return self._linear(weights)

    def norm(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> PackedNorm:
        return pack_norm(NormCode[norm.kind.name], weight.float() + norm.weight_offset, bias, norm.eps)

    def experts(self, weights: ExpertWeights) -> PackedExperts:
        trim_heap()
        spec, groups = weights.spec, weights.spec.groups
        router, experts = self._linear(weights.router), [self._mlp(expert) for expert in weights.experts]
        return PackedExperts(
            router,
            [gate_up for gate_up, _ in experts],
            [down for _, down in experts],
            spec.num_chosen,
            spec.normalized,
            spec.scale,
            ActivationCode[spec.experts[0].activation.name],
            None if weights.shared is None else self._mlp(weights.shared),
            ExpertScoring[spec.scores.name],
            weights.choice_bias,
            None if groups is None else (groups.count, groups.num_chosen, groups.num_summed),
        )

    def latent(self, built: BuiltLatent[PackedMatrix, PackedNorm]) -> PackedLatent:
        """The products of single heads stay in the model's dtype: they are small, and their errors would add up."""
        spec, query = built.spec, None
        if spec.query_norm is not None and built.query_norm is not None and built.query_up is not None:
            query = spec.query_norm.size, built.query_norm, built.query_up
        pack = partial(self._pack, MatrixFormat.PLAIN, bias=None)
        return PackedLatent(
            spec.rank,
            spec.rotated_dim,
            spec.plain_dim,
            spec.value_dim,
            spec.rotates_neighbours,
            built.kv_norm,
            [pack(head[: spec.plain_dim].t()) for head in built.kv_up],
            [pack(head[spec.plain_dim :]) for head in built.kv_up],
            query,
        )

    def head(self, weights: WeightParts) -> PackedMatrix:
        matrix_format = self._format_of(weights.layer)
        if weights.codes.has_blocks and matrix_format is not MatrixFormat.PLAIN:
            return self._blocks(weights, matrix_format, torch.cat)
        weight, bias = weights.fused(self._dtype_of(weights, matrix_format))
        code_scales = torch.cat(weights.code_scales) if weights.code_scales else None
        return self._pack(_OF_HEADS.get(matrix_format, matrix_format), weight, bias, code_scales)

    def _mlp(self, weights: MlpWeights) -> tuple[PackedMatrix, PackedMatrix]:
        return self._linear(weights.gate_up, of_expert=True), self._linear(weights.down, of_expert=True)

    def _linear(self, weights: LinearWeights, *, of_expert: bool = False) -> PackedMatrix:
        matrix_format = self._format_of(weights.layer)
        kept = IN_NIBBLES.get(matrix_format) if weights.codes.keeps_nibbles(of_expert=of_expert) else None
        order = _order_of(weights)
        join_parts = torch.cat if order is None else partial(join, order)
        if weights.codes.keeps_blocks(of_expert=of_expert) and matrix_format is not MatrixFormat.PLAIN:
            return self._blocks(weights, matrix_format, join_parts)
        if kept is not None or matrix_format.has_nibbles:
            quantize = partial(quantize_in_nibbles, self._thread_pool) if kept is None else None
            dtype = self._dtype if kept is None else weights.code_dtype
            held, bias = read_nibbles(weights, quantize, dtype, join_parts, of_expert=of_expert)
            if isinstance(held, Tensor):
                return self._pack(matrix_format, held, bias)
            return pack_nibbles(
                self._thread_pool,
                held,
                bias,
                matrix_format=kept or matrix_format,
                dtype=self._dtype,
                memory=self._memory,
                input_multiple=self._input_multiple(kept or matrix_format),
            )
        dtype = self._dtype_of(weights, matrix_format)
        if order is not None:
            return self._pack(matrix_format, *read_joined(order, weights, dtype))
        weight, bias = weights.fused(dtype)
        return self._pack(matrix_format, weight, bias, torch.cat(weights.code_scales))

    def _blocks(
        self, weights: WeightParts, asked: MatrixFormat, join_parts: Callable[[list[Tensor]], Tensor]
    ) -> PackedMatrix:
        """A layer with its own codes, whatever bits are asked of weights. Activations have the bits that are asked."""
        held, bias = read_blocks(weights, join_parts)
        if isinstance(held, NibbleWeight):
            matrix_format = MatrixFormat.W4A8 if asked.takes_codes else MatrixFormat.W4A16
            pack: Callable[..., PackedMatrix] = pack_nibbles
        else:
            matrix_format = MatrixFormat.GROUPED_W8A8 if asked.takes_codes else MatrixFormat.GROUPED_W8A16
            pack = pack_grouped_bytes
        return pack(
            self._thread_pool,
            held,
            bias,
            matrix_format=matrix_format,
            dtype=self._dtype,
            memory=self._memory,
            input_multiple=self._input_multiple(matrix_format),
        )

    def _input_multiple(self, matrix_format: MatrixFormat) -> int:
        return amx_input_multiple(matrix_format) if self._use_amx else 1

    def _dtype_of(self, weights: WeightParts, matrix_format: MatrixFormat) -> torch.dtype:
        """In which the numbers of a layer are read before they are laid out."""
        return self._dtype if matrix_format is MatrixFormat.PLAIN else weights.code_dtype

    def _format_of(self, layer: LinearLayer) -> MatrixFormat:
        return self._default if layer.computed is None else _FORMATS[layer.computed]

    def _pack(
        self, matrix_format: MatrixFormat, weight: Tensor, bias: Tensor | None, code_scales: Tensor | None = None
    ) -> PackedMatrix:
        pack = pack_for_amx if self._use_amx else pack_matrix
        return pack(
            self._thread_pool,
            weight,
            bias,
            matrix_format=matrix_format,
            memory=self._memory,
            code_scales=code_scales,
            dtype=self._dtype,
        )


def _pairs_halves(layer: LinearLayer) -> bool:
    """Whether the outputs of a layer are those of heads whose halves are paired. Latent vectors have no heads."""
    return layer.role is LinearRole.QKV and HalfHeads.suits(layer.split_unit)


def _order_of(weights: LinearWeights) -> PanelOrder | None:
    """None: the parts side by side."""
    layer, outputs = weights.layer, weights.outputs
    if layer.role is LinearRole.GATE_UP and len(outputs) == 2:
        return GateAndUp(outputs[0])
    return HalfHeads(outputs, layer.split_unit) if _pairs_halves(layer) else None


class CompiledModel:
    """A model's weights in the layout of the compiled code."""

    def __init__(
        self,
        description: ModelDescription,
        checkpoint: Checkpoint,
        thread_pool: ThreadPool,
        weights: MatrixFormat = MatrixFormat.PLAIN,
    ) -> None:
        """`weights`: the format of layers that name none.

        Raises UnsupportedModel if the description is not supported, or tensors do not match it.
        """
        check_computed("the compiled kernels", description, COMPUTED)
        self.description = description
        self.thread_pool = thread_pool
        self.dtype = checkpoint.dtype
        self.use_amx = checkpoint.dtype == torch.bfloat16 and has_amx(thread_pool)
        """Whether products are computed by AMX."""
        builder = _CompiledBuilder(thread_pool, checkpoint.dtype, weights, use_amx=self.use_amx)
        self._built = build(description, checkpoint, builder)
        ropes = layer_ropes(description)
        head_dim = self.layout.head_dim
        self._frequencies = [inverse_frequencies(rope, head_dim).contiguous() for rope in ropes.distinct]
        self._ropes = (RopeArgs * len(ropes.distinct))(
            *(
                RopeArgs(frequencies.data_ptr(), len(frequencies), rope.attention_factor)
                for rope, frequencies in zip(ropes.distinct, self._frequencies, strict=True)
            )
        )
        self._latents: list[PackedLatent | None] = []
        layers = self._built.layers
        for number, layer in enumerate(layers):
            self._latents.append(None if layer.latent is None else builder.latent(layer.latent))
            # Its products are packed, so what they were made of is released.
            layers[number] = replace(layer, latent=None)
        self._layers = (DecoderLayerArgs * len(layers))(*map(_layer_args, layers, self._latents, ropes.of_layers))

    @property
    def layout(self) -> ModelLayout:
        return self.description.layout

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        forward = self.over(cache)
        sampler = CompiledSampler(self.thread_pool, forward.argmax)
        return HostThreadExecutor(forward, sampler, partial(top_logprobs, self.thread_pool), forward_finds_argmax=True)

    def over(self, cache: KVCache) -> "CompiledForward":
        """The model over a cache. Raises UnsupportedModel if the kernels do not support one of this shape."""
        description, built = self.description, self._built
        attention = description.layers[0].attention
        refused = check_compiled_support(attention.head_dim, cache.block_size, self.dtype)
        if refused is not None:
            raise UnsupportedModel(f"the compiled kernels cannot be used: {refused}")
        arguments = DecoderModelArgs(
            description.hidden_size,
            len(description.layers),
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            self._layers,
            built.norm.args(),
            built.head.args(),
            description.logits_soft_cap or 0.0,
            built.embedding.data_ptr(),
            torch.tensor(description.embedding_scale, dtype=self.dtype).item(),
            None if built.positions is None else built.positions.data_ptr(),
            cache.values.data_ptr(),
            None if cache.scales is None else cache.scales.data_ptr(),
            block_stride(cache.values),
            cache.block_size,
            len(self._ropes),
            self._ropes,
            int(_pairs_halves(attention.qkv)),
        )
        return CompiledForward(self, cache, arguments)


def load_compiled_model(
    description: ModelDescription,
    directory: Path,
    dtype: torch.dtype,
    kernels: CompiledKernels,
    meter: ReadMeter | None = None,
) -> CompiledModel:
    """Loads the model of a directory. Raises UnsupportedModel if it is not supported, or its tensors do not match."""
    cpu = torch.device("cpu")
    with open_checkpoint(directory, dtype, cpu, meter) as checkpoint:
        return CompiledModel(description, checkpoint, kernels.thread_pool, kernels.weights)


class CompiledForward:
    """A `Forward`: the compiled model over its cache."""

    def __init__(self, model: CompiledModel, cache: KVCache, arguments: DecoderModelArgs) -> None:
        self._model, self._cache = model, cache
        self._logits = torch.empty(0, model.description.vocab_size)
        self._argmax: NDArray[np.int64] = np.empty(0, np.int64)
        # The pool's threads compute. torch's own threads would spin and compete with them.
        torch.set_num_threads(1)
        self._decoder = Decoder(model.thread_pool, model.dtype, arguments, use_amx=model.use_amx)

    def __call__(self, batch: Batch) -> Tensor:
        logits = self._logits_of(len(batch.logits_indices))
        self._argmax = np.empty(len(logits), np.int64)
        step = DecoderStepArgs(
            len(batch.token_ids),
            batch.token_ids.ctypes.data,
            batch.slots.ctypes.data,
            batch.positions.ctypes.data,
            SequencesArgs(
                len(batch.context_lens),
                batch.block_tables.shape[1],
                batch.block_tables.ctypes.data,
                batch.query_starts.ctypes.data,
                batch.context_lens.ctypes.data,
            ),
            len(batch.logits_indices),
            batch.logits_indices.ctypes.data,
            logits.data_ptr(),
            logits.shape[1],
            None if batch.needs_logits is None else batch.needs_logits.ctypes.data,
            self._argmax.ctypes.data,
        )
        self._decoder(step)
        return logits

    def argmax(self, logits: Tensor) -> NDArray[np.int64]:
        """As `quire_kernels.cpu.sample.argmax`, for the logits returned last; the forward pass computed it."""
        if logits.data_ptr() != self._logits.data_ptr() or len(logits) != len(self._argmax):
            raise ValueError("logits: must be those that the last forward pass returned")
        return self._argmax

    def _logits_of(self, num_samples: int) -> Tensor:
        if len(self._logits) < num_samples:
            # Fresh memory of that size would be page-faulted in for each step.
            self._logits = torch.empty(num_samples, self._model.description.vocab_size)
        return self._logits[:num_samples]


def _layer_args(
    layer: BuiltLayer[PackedMatrix, PackedNorm, PackedExperts], latent: PackedLatent | None, rope: int | None
) -> DecoderLayerArgs:
    attention, experts = layer.spec.attention, layer.mlp if isinstance(layer.mlp, PackedExperts) else None
    return DecoderLayerArgs(
        layer.attention_norm.args(),
        _optional_norm(layer.query_norm),
        _optional_norm(layer.key_norm),
        _optional_norm(layer.post_attention_norm),
        layer.mlp_norm.args(),
        _optional_norm(layer.post_mlp_norm),
        layer.qkv.args(),
        layer.output.args(),
        RuleArgs(attention.scale, attention.soft_cap or 0.0, attention.window or 0),
        -1 if rope is None else rope,
        MlpArgs() if isinstance(layer.mlp, PackedExperts) else _mlp_args(layer.mlp),
        None if experts is None else pointer(experts.args()),
        int(layer.spec.parallel),
        int(attention.has_joint_norms),
        None if latent is None else pointer(latent.args()),
    )


def _mlp_args(mlp: BuiltMlp[PackedMatrix]) -> MlpArgs:
    activation, is_gated = ActivationCode[mlp.spec.activation.name], mlp.spec.kind is MlpKind.GATED
    return MlpArgs(mlp.gate_up.args(), mlp.down.args(), activation, int(is_gated))


def _optional_norm(norm: PackedNorm | None) -> NormArgs:
    return NormArgs() if norm is None else norm.args()
