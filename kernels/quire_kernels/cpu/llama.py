"""The structures that the compiled forward pass of the Llama family takes."""

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p

from quire_kernels.cpu.attention import RuleArgs, SequencesArgs
from quire_kernels.cpu.linear import MatrixArgs


class LayerArgs(Structure):
    """`Layer` of llama.h."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", MatrixArgs),
        ("output", MatrixArgs),
        ("gate_up", MatrixArgs),
        ("down", MatrixArgs),
        ("rule", RuleArgs),
    )


class ModelArgs(Structure):
    """`Model` of llama.h."""

    _fields_ = (
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("num_layers", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("norm_epsilon", c_float),
        ("layers", POINTER(LayerArgs)),
        ("norm", c_void_p),
        ("head", MatrixArgs),
        ("embedding", c_void_p),
        ("cache", c_void_p),
        ("block_size", c_int64),
        ("frequencies", c_void_p),
        ("rotation_factor", c_float),
    )


class StepArgs(Structure):
    """`Step` of llama.h."""

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
        ("argmax", c_void_p),
    )
