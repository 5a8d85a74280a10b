"""The compiled forward pass of decoders: all layers of a step in one call."""

from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p

import torch

from quire_kernels._checks import require
from quire_kernels.cpu.amx import has_amx
from quire_kernels.cpu.attention import RuleArgs, SequencesArgs
from quire_kernels.cpu.experts import ExpertsArgs
from quire_kernels.cpu.head_bounds import HeadBoundsArgs
from quire_kernels.cpu.latent import LatentArgs
from quire_kernels.cpu.linear import MatrixArgs
from quire_kernels.cpu.norms import NormArgs
from quire_kernels.cpu.thread_pool import ThreadPool, type_of


class RopeArgs(Structure):
    """`Rope` of rotary.h."""

    _fields_ = (("frequencies", c_void_p), ("num_pairs", c_int64), ("factor", c_float), ("query_factors", c_void_p))


class MlpArgs(Structure):
    """`Mlp` of decoder_model.h. With a gate, outputs of `gate_up` are sixteen of the gate, the same of up, and so on,
    both padded to a multiple of 32.
    """

    _fields_ = (("gate_up", MatrixArgs), ("down", MatrixArgs), ("activation", c_int64), ("is_gated", c_int64))


class HeadsArgs(Structure):
    """`Heads` of decoder_model.h."""

    _fields_ = (
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("has_paired_halves", c_int64),
    )


class LayerInputArgs(Structure):
    """`LayerInput` of decoder_model.h."""

    _fields_ = (("gate", MatrixArgs), ("up", MatrixArgs), ("norm", NormArgs), ("activation", c_int64))


class LayerInputsArgs(Structure):
    """`LayerInputs` of decoder_model.h."""

    _fields_ = (
        ("width", c_int64),
        ("embedding", c_void_p),
        ("embedding_scale", c_float),
        ("projection", MatrixArgs),
        ("norm", NormArgs),
        ("scale", c_float),
    )


class BesideArgs(Structure):
    """`Beside` of decoder_model.h."""

    _fields_ = (
        ("mlp", MlpArgs),
        ("norm", NormArgs),
        ("post_norm", NormArgs),
        ("experts_post_norm", NormArgs),
        ("router_norm", NormArgs),
    )


class DecoderLayerArgs(Structure):
    """`DecoderLayer` of decoder_model.h."""

    _fields_ = (
        ("attention_norm", NormArgs),
        ("query_norm", NormArgs),
        ("key_norm", NormArgs),
        ("value_norm", NormArgs),
        ("post_attention_norm", NormArgs),
        ("mlp_norm", NormArgs),
        ("post_mlp_norm", NormArgs),
        ("qkv", MatrixArgs),
        ("output", MatrixArgs),
        ("heads", HeadsArgs),
        ("rule", RuleArgs),
        ("rope", c_int64),
        ("mlp", MlpArgs),
        ("experts", POINTER(ExpertsArgs)),
        ("beside", POINTER(BesideArgs)),
        ("is_parallel", c_int64),
        ("has_joint_norms", c_int64),
        ("norms_after_rotation", c_int64),
        ("latent", POINTER(LatentArgs)),
        ("has_keys", c_int64),
        ("values_are_keys", c_int64),
        ("input", POINTER(LayerInputArgs)),
        ("scale", c_float),
        ("cache", c_void_p),
        ("cache_scales", c_void_p),
    )


class DecoderModelArgs(Structure):
    """`DecoderModel` of decoder_model.h."""

    _fields_ = (
        ("hidden_size", c_int64),
        ("num_layers", c_int64),
        ("layers", POINTER(DecoderLayerArgs)),
        ("norm", NormArgs),
        ("head", MatrixArgs),
        ("head_bounds", POINTER(HeadBoundsArgs)),
        ("logits_scale", c_float),
        ("logits_soft_cap", c_float),
        ("embedding", c_void_p),
        ("embedding_scale", c_float),
        ("positions", c_void_p),
        ("layer_inputs", POINTER(LayerInputsArgs)),
        ("cache_stride", c_int64),
        ("block_size", c_int64),
        ("num_ropes", c_int64),
        ("ropes", POINTER(RopeArgs)),
    )


class DecoderStepArgs(Structure):
    """`DecoderStep` of decoder_model.h."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("token_ids", c_void_p),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("sequences", SequencesArgs),
        ("num_samples", c_int64),
        ("logits_indices", c_void_p),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("needs_logits", c_void_p),
        ("argmax", c_void_p),
        ("states", c_void_p),
        ("states_stride", c_int64),
    )


class Decoder:
    """A decoder whose weights and cache are at the addresses in its arguments, which the caller keeps. For one thread.

    A token's bits do not depend on the other tokens of its step.
    """

    def __init__(
        self, thread_pool: ThreadPool, dtype: torch.dtype, arguments: DecoderModelArgs, *, use_amx: bool
    ) -> None:
        """`dtype`: of weights, embedding and products. With `use_amx`, which is for bfloat16, matrices are packed by
        `pack_for_amx`, else by `pack_matrix`.

        Raises ValueError for another dtype, or `use_amx` on a processor without AMX.
        """
        require(not use_amx or dtype == torch.bfloat16, "use_amx", "be false for another dtype than bfloat16")
        require(not use_amx or has_amx(thread_pool), "use_amx", "be false on a processor without AMX")
        self._thread_pool = thread_pool  # whose threads the library's object uses
        self._handle: int | None = thread_pool.library.quire_decoder_new(
            thread_pool.handle, type_of(dtype), int(use_amx), byref(arguments)
        )

    def __call__(self, step: DecoderStepArgs) -> None:
        """Computes a step, and writes keys and values to the cache, and logits and their argmax to its addresses, or
        states if it has an address for them.

        A row whose `needs_logits` is 0 has an argmax and no logits; with `head_bounds` few of its logits are computed.
        """
        self._thread_pool.library.quire_decoder_run(self._handle, byref(step))

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._thread_pool.library.quire_decoder_delete(self._handle)
            self._handle = None
