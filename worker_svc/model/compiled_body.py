"""A described model's layers by compiled code on a CPU, up to the last norm."""

from ctypes import pointer
from dataclasses import replace

import torch

from quire_kernels.cpu.activations import ActivationCode
from quire_kernels.cpu.attention import RuleArgs, SequencesArgs, block_stride, check_compiled_support
from quire_kernels.cpu.decoder import (
    BesideArgs,
    Decoder,
    DecoderLayerArgs,
    DecoderModelArgs,
    HeadsArgs,
    LayerInputArgs,
    LayerInputsArgs,
    MlpArgs,
    RopeArgs,
)
from quire_kernels.cpu.experts import PackedExperts
from quire_kernels.cpu.latent import PackedLatent
from quire_kernels.cpu.linear import MatrixArgs, PackedMatrix
from quire_kernels.cpu.norms import NormArgs, NormCode, PackedNorm, pack_norm
from worker_svc.batch import Batch
from worker_svc.cache import KVCache
from worker_svc.errors import UnsupportedModel
from worker_svc.model.building import BuiltBeside, BuiltBody, BuiltLayer, BuiltLayerInput, BuiltLayerInputs, BuiltMlp
from worker_svc.model.compiled_builder import CompiledBuilder, CompiledHead, pairs_halves
from worker_svc.model.description import AttentionSpec, MlpKind, ModelDescription
from worker_svc.model.rope import layer_ropes, query_factors_of_context
from worker_svc.model.support import BY_EVERY_BACKEND, Feature

COMPUTED = BY_EVERY_BACKEND | {
    Feature.EXPERT_GROUPS,
    Feature.INT4_WEIGHTS,
    Feature.INT8_WEIGHTS,
    Feature.LATENT_ATTENTION,
    Feature.SIGMOID_ROUTER,
    Feature.SINGLE_HEAD_NORM,
}


class CompiledBody:
    """Weights at addresses that the compiled code has. They live as long as this object."""

    def __init__(
        self,
        description: ModelDescription,
        built: BuiltBody[PackedMatrix, PackedNorm, PackedExperts],
        builder: CompiledBuilder,
    ) -> None:
        """`built`: by `builder`, of `description`."""
        self.description, self._built = description, built
        self.thread_pool, self.dtype, self._use_amx = builder.thread_pool, builder.dtype, builder.use_amx
        ropes = layer_ropes(description)
        self._frequencies = [rope.frequencies().contiguous() for rope in ropes.distinct]
        self._query_factors = [
            query_factors_of_context(rope.config, description.context_length) for rope in ropes.distinct
        ]
        self._ropes = (RopeArgs * len(ropes.distinct))(
            *(
                RopeArgs(
                    frequencies.data_ptr(),
                    len(frequencies),
                    rope.config.attention_factor,
                    None if factors is None else factors.data_ptr(),
                )
                for rope, frequencies, factors in zip(
                    ropes.distinct, self._frequencies, self._query_factors, strict=True
                )
            )
        )
        self._inputs = None if built.layer_inputs is None else _inputs_args(built.layer_inputs)
        self._latents: list[PackedLatent | None] = []
        layers = built.layers
        for number, layer in enumerate(layers):
            self._latents.append(None if layer.latent is None else builder.latent(layer.latent))
            # Its products are packed, so what they were made of is released.
            layers[number] = replace(layer, latent=None)
        self._value_norms = [_value_norm(layer.spec.attention) for layer in layers]
        self._layers = (DecoderLayerArgs * len(layers))(
            *map(_layer_args, layers, self._latents, ropes.of_layers, self._value_norms)
        )

    def over(self, cache: KVCache, head: CompiledHead | None) -> Decoder:
        """The decoder over a cache of all layers, or of one, which each layer overwrites: then a step must have whole
        sequences. Without a head it computes states only. The caller keeps cache and head.

        Raises UnsupportedModel if the kernels do not support a cache of this shape.
        """
        description, built, layout = self.description, self._built, self.description.layout
        refused = check_compiled_support(layout.head_dims, cache.block_size, self.dtype)
        if refused is not None:
            raise UnsupportedModel(f"the compiled kernels cannot be used: {refused}")
        # The pool's threads compute. torch's own threads would spin and compete with them.
        torch.set_num_threads(1)
        layers = (DecoderLayerArgs * len(self._layers))(*self._layers)
        for layer, of_layer in zip(layers, cache.of_layers(layout), strict=True):
            layer.cache = of_layer.keys.data_ptr()
            layer.cache_scales = None if of_layer.key_scales is None else of_layer.key_scales.data_ptr()
        bounds = None if head is None or head.bounds is None else head.bounds.args(description.logits_scale)
        arguments = DecoderModelArgs(
            description.hidden_size,
            len(layers),
            layers,
            built.norm.args(),
            MatrixArgs() if head is None else head.matrix.args(),
            None if bounds is None else pointer(bounds),
            description.logits_scale,
            description.logits_soft_cap or 0.0,
            built.embedding.data_ptr(),
            built.embedding_scale,
            None if built.positions is None else built.positions.data_ptr(),
            None if self._inputs is None else pointer(self._inputs),
            block_stride(cache.layers[0].keys),
            cache.block_size,
            len(self._ropes),
            self._ropes,
        )
        return Decoder(self.thread_pool, self.dtype, arguments, use_amx=self._use_amx)


def token_args(batch: Batch) -> tuple[object, ...]:
    """The fields of `DecoderStepArgs` that say what a step computes, before those that say what it returns. The batch
    is kept until it is computed.
    """
    return (
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
    )


def _layer_args(
    layer: BuiltLayer[PackedMatrix, PackedNorm, PackedExperts],
    latent: PackedLatent | None,
    rope: int | None,
    value_norm: PackedNorm | None,
) -> DecoderLayerArgs:
    attention, experts = layer.spec.attention, layer.mlp if isinstance(layer.mlp, PackedExperts) else None
    return DecoderLayerArgs(
        _optional_norm(layer.attention_norm),
        _optional_norm(layer.query_norm),
        _optional_norm(layer.key_norm),
        _optional_norm(value_norm),
        _optional_norm(layer.post_attention_norm),
        _optional_norm(layer.mlp_norm),
        _optional_norm(layer.post_mlp_norm),
        layer.qkv.args(),
        layer.output.args(),
        HeadsArgs(attention.num_heads, attention.num_kv_heads, attention.head_dim, int(pairs_halves(attention.qkv))),
        RuleArgs(
            attention.scale,
            attention.soft_cap or 0.0,
            attention.window or 0,
            attention.bidirectional,
            None if layer.sinks is None else layer.sinks.data_ptr(),
        ),
        -1 if rope is None else rope,
        MlpArgs() if isinstance(layer.mlp, PackedExperts) else _mlp_args(layer.mlp),
        None if experts is None else pointer(experts.args()),
        None if layer.beside is None else pointer(_beside_args(layer.beside)),
        int(layer.spec.parallel),
        int(attention.has_joint_norms),
        int(attention.norms_after_rotation),
        None if latent is None else pointer(latent.args()),
        int(attention.shared_layer is None),
        int(attention.values_are_keys),
        None if layer.input is None else pointer(_input_args(layer.input)),
        layer.scale,
    )


def _mlp_args(mlp: BuiltMlp[PackedMatrix]) -> MlpArgs:
    activation, is_gated = ActivationCode[mlp.spec.activation.name], mlp.spec.kind is MlpKind.GATED
    return MlpArgs(mlp.gate_up.args(), mlp.down.args(), activation, int(is_gated))


def _beside_args(built: BuiltBeside[PackedMatrix, PackedNorm]) -> BesideArgs:
    norms = built.norm, built.post_norm, built.experts_post_norm, built.router_norm
    return BesideArgs(_mlp_args(built.mlp), *(norm.args() for norm in norms))


def _input_args(built: BuiltLayerInput[PackedMatrix, PackedNorm]) -> LayerInputArgs:
    activation = ActivationCode[built.spec.activation.name]
    return LayerInputArgs(built.gate.args(), built.up.args(), built.norm.args(), activation)


def _inputs_args(built: BuiltLayerInputs[PackedMatrix, PackedNorm]) -> LayerInputsArgs:
    return LayerInputsArgs(
        built.spec.width,
        built.embedding.data_ptr(),
        built.embedding_scale,
        built.projection.args(),
        built.norm.args(),
        built.spec.scale,
    )


def _value_norm(attention: AttentionSpec) -> PackedNorm | None:
    if attention.value_norm_eps is None:
        return None
    return pack_norm(NormCode.RMS, torch.ones(attention.head_dim), None, attention.value_norm_eps)


def _optional_norm(norm: PackedNorm | None) -> NormArgs:
    return NormArgs() if norm is None else norm.args()
