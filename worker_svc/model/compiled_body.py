"""A described model's layers by compiled code on a CPU, up to the last norm."""

from ctypes import pointer
from dataclasses import replace

import torch

from quire_kernels.cpu.activations import ActivationCode
from quire_kernels.cpu.attention import RuleArgs, SequencesArgs, block_stride, check_compiled_support
from quire_kernels.cpu.decoder import Decoder, DecoderLayerArgs, DecoderModelArgs, MlpArgs, RopeArgs
from quire_kernels.cpu.experts import PackedExperts
from quire_kernels.cpu.latent import PackedLatent
from quire_kernels.cpu.linear import MatrixArgs, PackedMatrix
from quire_kernels.cpu.norms import NormArgs, PackedNorm
from worker_svc.batch import Batch
from worker_svc.cache import KVCache
from worker_svc.errors import UnsupportedModel
from worker_svc.model.building import BuiltBody, BuiltLayer, BuiltMlp
from worker_svc.model.compiled_builder import CompiledBuilder, pairs_halves
from worker_svc.model.description import MlpKind, ModelDescription
from worker_svc.model.rope import inverse_frequencies, layer_ropes, query_factors
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
        head_dim = description.layout.head_dim
        self._frequencies = [inverse_frequencies(rope, head_dim).contiguous() for rope in ropes.distinct]
        every_position = torch.arange(description.context_length)
        self._query_factors = [query_factors(rope, every_position) for rope in ropes.distinct]
        self._ropes = (RopeArgs * len(ropes.distinct))(
            *(
                RopeArgs(
                    frequencies.data_ptr(),
                    len(frequencies),
                    rope.attention_factor,
                    None if factors is None else factors.data_ptr(),
                )
                for rope, frequencies, factors in zip(
                    ropes.distinct, self._frequencies, self._query_factors, strict=True
                )
            )
        )
        self._latents: list[PackedLatent | None] = []
        layers = built.layers
        for number, layer in enumerate(layers):
            self._latents.append(None if layer.latent is None else builder.latent(layer.latent))
            # Its products are packed, so what they were made of is released.
            layers[number] = replace(layer, latent=None)
        self._layers = (DecoderLayerArgs * len(layers))(*map(_layer_args, layers, self._latents, ropes.of_layers))

    def over(self, cache: KVCache, head: PackedMatrix | None) -> Decoder:
        """The decoder over a cache of all layers, or of one, which each layer overwrites: then a step must have whole
        sequences. Without a head it computes states only. The caller keeps cache and head.

        Raises UnsupportedModel if the kernels do not support a cache of this shape.
        """
        description, built = self.description, self._built
        attention = description.layers[0].attention
        refused = check_compiled_support(attention.head_dim, cache.block_size, self.dtype)
        if refused is not None:
            raise UnsupportedModel(f"the compiled kernels cannot be used: {refused}")
        # The pool's threads compute. torch's own threads would spin and compete with them.
        torch.set_num_threads(1)
        num_layers = len(description.layers)
        arguments = DecoderModelArgs(
            description.hidden_size,
            num_layers,
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            self._layers,
            built.norm.args(),
            MatrixArgs() if head is None else head.args(),
            description.logits_scale,
            description.logits_soft_cap or 0.0,
            built.embedding.data_ptr(),
            built.embedding_scale,
            None if built.positions is None else built.positions.data_ptr(),
            cache.values.data_ptr(),
            None if cache.scales is None else cache.scales.data_ptr(),
            block_stride(cache.values),
            cache.block_size,
            int(cache.num_layers < num_layers),
            len(self._ropes),
            self._ropes,
            int(pairs_halves(attention.qkv)),
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
    layer: BuiltLayer[PackedMatrix, PackedNorm, PackedExperts], latent: PackedLatent | None, rope: int | None
) -> DecoderLayerArgs:
    attention, experts = layer.spec.attention, layer.mlp if isinstance(layer.mlp, PackedExperts) else None
    return DecoderLayerArgs(
        _optional_norm(layer.attention_norm),
        _optional_norm(layer.query_norm),
        _optional_norm(layer.key_norm),
        _optional_norm(layer.post_attention_norm),
        _optional_norm(layer.mlp_norm),
        _optional_norm(layer.post_mlp_norm),
        layer.qkv.args(),
        layer.output.args(),
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
        int(layer.spec.parallel),
        int(attention.has_joint_norms),
        int(attention.norms_after_rotation),
        None if latent is None else pointer(latent.args()),
    )


def _mlp_args(mlp: BuiltMlp[PackedMatrix]) -> MlpArgs:
    activation, is_gated = ActivationCode[mlp.spec.activation.name], mlp.spec.kind is MlpKind.GATED
    return MlpArgs(mlp.gate_up.args(), mlp.down.args(), activation, int(is_gated))


def _optional_norm(norm: PackedNorm | None) -> NormArgs:
    return NormArgs() if norm is None else norm.args()
