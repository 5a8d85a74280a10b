"""The compiled ops on torch tensors of the processor.

The cache is laid out for them: in a block, keys lie dimension by dimension, values token by token, and of bfloat16
always two side by side (`csrc/attention.h`). Only they read and write it.
"""

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire_kernels._checks import require

PANEL = 32
_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class MatrixArgs(Structure):
    """`Matrix` of linear.h."""

    _fields_ = (
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("format", c_int64),
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    )


class CacheArgs(Structure):
    """`Cache` of attention.h."""

    _fields_ = (
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("value_offset", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
    )


class SequencesArgs(Structure):
    """`Sequences` of attention.h."""

    _fields_ = (
        ("count", c_int64),
        ("max_blocks", c_int64),
        ("block_tables", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
    )


class RuleArgs(Structure):
    """`AttentionRule` of attention.h."""

    _fields_ = (("scale", c_float), ("soft_cap", c_float), ("window", c_int64))


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
        ("window", c_int64),
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
        ("attention_scale", c_float),
        ("layers", POINTER(LayerArgs)),
        ("norm", c_void_p),
        ("head", MatrixArgs),
        ("embedding", c_void_p),
        ("cache", c_void_p),
        ("block_size", c_int64),
    )


class StepArgs(Structure):
    """`Step` of llama.h."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("token_ids", c_void_p),
        ("slots", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("sequences", SequencesArgs),
        ("num_draws", c_int64),
        ("draw_rows", c_void_p),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
    )


def type_of(dtype: torch.dtype) -> int:
    """The library's name of a dtype. Raises ValueError for one that it does not compute in."""
    require(dtype in _TYPES, "dtype", "be float32 or bfloat16")
    return _TYPES[dtype]


class Team:
    """Threads that run the ops, the calling one among them. One op at a time, and no fork while it lives."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self.library = library
        _declare(library)
        self.handle: int | None = library.quire_team_new(size)

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self.library.quire_team_delete(self.handle)
            self.handle = None


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A linear map, laid out for the processor: of the dtype of its inputs, or int8 with a scale for each output."""

    outputs: int
    inputs: int
    panels: Tensor
    scales: Tensor | None
    bias: Tensor | None

    def args(self) -> MatrixArgs:
        """What the library is told. Valid as long as this lives."""
        return MatrixArgs(
            self.outputs,
            self.inputs,
            int(self.scales is not None),
            self.panels.data_ptr(),
            None if self.scales is None else self.scales.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
        )


def pack_matrix(team: Team, weight: Tensor, bias: Tensor | None = None, *, int8: bool = False) -> PackedMatrix:
    """Lay out a weight [outputs, inputs] of float32 or bfloat16, and a bias [outputs].

    With `int8`, values are rounded to 255 steps between the largest of their output and its negative.
    """
    outputs, inputs = weight.shape
    values = 1 if weight.dtype == torch.float32 else 2
    type_of(weight.dtype)
    scales = None
    if int8:
        scale = weight.float().abs().amax(1, keepdim=True).div_(127.0).clamp_(min=torch.finfo(torch.float32).tiny)
        weight = weight.float().div(scale).round_().to(torch.int8)
        scales = _padded(scale.squeeze(1))
    weight = weight.contiguous()
    steps = -(-inputs // values)
    panels = torch.empty(-(-outputs // PANEL) * steps * PANEL * values, dtype=weight.dtype)
    team.library.quire_pack(weight.data_ptr(), outputs, inputs, weight.element_size(), values, panels.data_ptr())
    return PackedMatrix(outputs, inputs, panels, scales, None if bias is None else _padded(bias.float()))


def linear(team: Team, inputs: Tensor, matrix: PackedMatrix) -> Tensor:
    """The float32 images [rows, outputs] of `inputs` [rows, inputs], float32 or bfloat16."""
    kind = type_of(inputs.dtype)
    require(inputs.ndim == 2 and inputs.shape[1] == matrix.inputs, "inputs", f"be [rows, {matrix.inputs}]")
    padded = torch.nn.functional.pad(inputs, (0, inputs.shape[1] % 2)).contiguous()
    output = torch.empty(len(inputs), matrix.outputs)
    team.library.quire_linear(
        team.handle, kind, byref(matrix.args()), padded.data_ptr(), len(inputs), padded.shape[1], output.data_ptr()
    )
    return output


@dataclass(frozen=True, eq=False)
class CacheLayer:
    """One layer's keys and values in a cache [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

    What the sizes say of the last two dimensions is their product: within a head's block, the ops have an order of
    their own. Block size 8 or a multiple of 16; head dimensions a multiple of 16.
    """

    cache: Tensor
    layer: int

    def args(self) -> CacheArgs:
        """What the library is told. Valid as long as this lives."""
        _, _, _, num_kv_heads, block_size, head_dim = self.cache.shape
        require(block_size == 8 or block_size % 16 == 0, "cache", "have a block_size of 8 or a multiple of 16")
        require(head_dim % 16 == 0, "cache", "have a head_dim that is a multiple of 16")
        require(self.cache.is_contiguous(), "cache", "be contiguous")
        half = num_kv_heads * block_size * head_dim
        data = self.cache.data_ptr() + self.layer * 2 * half * self.cache.element_size()
        return CacheArgs(data, self.cache.stride(0), half, num_kv_heads, block_size, head_dim)


def store(team: Team, key: Tensor, value: Tensor, layer: CacheLayer, slots: Tensor) -> None:
    """Write each token's key and value [num_tokens, num_kv_heads, head_dim] to its slot.

    Each token's heads are contiguous; `slots` int64 [num_tokens], -1 for a token that is not stored.
    """
    kind = type_of(layer.cache.dtype)
    for name, tensor in (("key", key), ("value", value)):
        _check_tokens(name, tensor, layer, layer.cache.shape[3])
    require(slots.dtype == torch.int64 and slots.shape == (len(key),), "slots", "be int64 [num_tokens]")
    team.library.quire_store(
        team.handle,
        kind,
        byref(layer.args()),
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        slots.data_ptr(),
        len(key),
    )


def attend(
    team: Team,
    query: Tensor,
    layer: CacheLayer,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """What `paged_attention` does: causal attention of each sequence's newest tokens over its pages.

    A query's result does not depend on how its sequence was cut into steps, or on what else is in the step. Factors
    are rounded to the cache's dtype, the weights of the softmax among them; sums are float32.

    Args:
        query: [num_tokens, num_heads, head_dim], contiguous.
        block_tables, query_starts, context_lens: int32, as `paged_attention` has them.
        scale: what scores are multiplied by.
        window: a query sees itself and the window - 1 tokens before it; None: all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None: they stay.

    Returns:
        [num_tokens, num_heads, head_dim], of the dtype of `query`.
    """
    num_kv_heads = layer.cache.shape[3]
    _check_tokens("query", query, layer, query.shape[1])
    require(query.is_contiguous(), "query", "be contiguous")
    require(query.shape[1] % num_kv_heads == 0, "query", "have a multiple of the cache's num_kv_heads heads")
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_starts", query_starts),
        ("context_lens", context_lens),
    ):
        require(tensor.dtype == torch.int32 and tensor.is_contiguous(), name, "be int32 and contiguous")
    output = torch.empty_like(query)
    sequences = SequencesArgs(
        len(context_lens),
        block_tables.shape[1],
        block_tables.data_ptr(),
        query_starts.data_ptr(),
        context_lens.data_ptr(),
    )
    team.library.quire_attend(
        team.handle,
        type_of(layer.cache.dtype),
        byref(layer.args()),
        byref(sequences),
        byref(RuleArgs(scale, soft_cap or 0.0, window or 0)),
        query.shape[1] // num_kv_heads,
        query.data_ptr(),
        output.data_ptr(),
    )
    return output


def _check_tokens(name: str, tensor: Tensor, layer: CacheLayer, num_heads: int) -> None:
    head_dim = layer.cache.shape[5]
    require(
        tensor.ndim == 3 and tensor.shape[1:] == (num_heads, head_dim), name, f"be [tokens, {num_heads}, {head_dim}]"
    )
    require(tensor.stride()[1:] == (head_dim, 1), name, "be contiguous in each token")
    require(tensor.dtype == layer.cache.dtype, name, "have the dtype of the cache")


def _padded(row: Tensor) -> Tensor:
    return torch.nn.functional.pad(row, (0, -len(row) % PANEL)).contiguous()


def _declare(library: Any) -> None:
    pointer, number = c_void_p, c_int64
    for name, result, *arguments in (
        ("team_new", pointer, number),
        ("team_delete", None, pointer),
        ("pack", None, pointer, number, number, number, number, pointer),
        ("linear", None, pointer, number, pointer, pointer, number, number, pointer),
        ("store", None, pointer, number, pointer, pointer, number, pointer, number, pointer, number),
        ("attend", None, pointer, number, pointer, pointer, pointer, number, pointer, pointer),
        ("llama_new", pointer, pointer, number, pointer),
        ("llama_delete", None, pointer),
        ("llama_run", None, pointer, pointer),
    ):
        function = getattr(library, f"quire_{name}")
        function.restype, function.argtypes = result, arguments
