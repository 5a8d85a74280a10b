"""Linear layers of a GPU: in the model's dtype, or with weights in codes, and rows too.

Codes of a checkpoint are kept where the format that is asked has them; other weights are rounded on the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire_kernels._shapes import SCALED_GROUP
from quire_kernels.activation import Activation, activation_product, gated_activation, plain_activation
from quire_kernels.coded_rows import CodedRows, RowCoding, code_activation, code_activation_product, code_rows
from quire_kernels.cpu.grouped_bytes import ByteWeight
from quire_kernels.cpu.nibbles import NibbleWeight, split_scales
from quire_kernels.invariant_linear import invariant_linear
from quire_kernels.kv_quantization import MAX_CODES
from quire_kernels.round_to_nibbles import round_to_nibbles
from quire_kernels.scaled_linear import CodedMatrix, scaled_linear
from quire_kernels.weight_only_linear import weight_only_linear
from quire_kernels.weight_only_matrix import MOST_ZERO, GroupScales, WeightOnlyMatrix, pack_codes
from worker_svc.model.block_weights import read_blocks
from worker_svc.model.device_formats import Quantization
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.nibble_weights import read_nibbles

Rows: TypeAlias = Tensor | CodedRows
# Outputs whose numbers are in float32 at once.
_OUTPUTS = 4096


class Product(Protocol):
    """A linear map [num_tokens, inputs] to [num_tokens, outputs]."""

    @property
    def coding(self) -> RowCoding | None:
        """How its inputs may be coded before; None: they may not."""

    def __call__(self, inputs: Rows) -> Tensor:
        """The outputs, in the model's dtype. Rows that are not in codes are coded if they need to be."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseProduct:
    """A `Product` in the model's dtype."""

    weight: Tensor
    bias: Tensor | None
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    @property
    def coding(self) -> None:
        return None

    def __call__(self, inputs: Rows) -> Tensor:
        assert isinstance(inputs, Tensor)
        return self.multiply(inputs, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class WeightOnlyProduct:
    """A `Product` with a weight in codes."""

    weight: WeightOnlyMatrix
    bias: Tensor | None
    order: Tensor | None
    """int64 [inputs]: the inputs in the order in which the weight has them; None: as they are."""
    deterministic: bool

    @property
    def coding(self) -> None:
        return None

    def __call__(self, inputs: Rows) -> Tensor:
        assert isinstance(inputs, Tensor)
        rows = inputs if self.order is None else inputs.index_select(1, self.order)
        return weight_only_linear(rows, self.weight, self.bias, deterministic=self.deterministic)


@dataclass(frozen=True, slots=True, eq=False)
class CodedProduct:
    """A `Product` of rows in codes with a weight in codes."""

    weight: CodedMatrix
    bias: Tensor | None
    dtype: torch.dtype
    deterministic: bool

    @property
    def coding(self) -> RowCoding:
        return self.weight.coding

    def __call__(self, inputs: Rows) -> Tensor:
        rows = inputs if isinstance(inputs, CodedRows) else code_rows(inputs, self.coding)
        return scaled_linear(rows, self.weight, self.bias, self.dtype, deterministic=self.deterministic)


def activated(inputs: Tensor, activation: Activation, coding: RowCoding | None, *, is_gated: bool) -> Rows:
    """The activation of what gate and up, or up alone, return, in codes if the product that follows takes them."""
    if coding is not None:
        return code_activation(inputs, activation, coding, is_gated=is_gated)
    return (gated_activation if is_gated else plain_activation)(inputs, activation)


def activated_product(inputs: Tensor, factors: Tensor, activation: Activation, coding: RowCoding | None) -> Rows:
    """The activation of inputs, times factors of the same shape, in codes if the product that follows takes them."""
    if coding is not None:
        return code_activation_product(inputs, factors, activation, coding)
    return activation_product(inputs, factors, activation)


class BuiltMatrix(NamedTuple):
    """A weight in codes, on its device."""

    matrix: CodedMatrix | WeightOnlyMatrix
    bias: Tensor | None
    """[outputs], in the model's dtype."""
    order: Tensor | None = None
    """As that of a `WeightOnlyProduct`."""


def build_product(weights: LinearWeights, quantization: Quantization | None, *, deterministic: bool) -> Product:
    """A layer in a format; without one, in the model's dtype."""
    if quantization is None:
        return DenseProduct(*weights.fused(), invariant_linear if deterministic else F.linear)
    matrix, bias, order = build_matrix(weights, quantization)
    if isinstance(matrix, CodedMatrix):
        return CodedProduct(matrix, bias, weights.dtype, deterministic)
    return WeightOnlyProduct(matrix, bias, order, deterministic)


def build_matrix(weights: LinearWeights, quantization: Quantization, *, of_expert: bool = False) -> BuiltMatrix:
    """A layer's weight in a format. With `of_expert` its inputs are in order: experts are alike."""
    device, dtype = weights.device, weights.dtype

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.to(device) for part in parts])

    def in_dtype(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(device, dtype)

    if weights.codes.keeps_blocks(of_expert=of_expert):
        # Codes are kept, whatever bits are asked, in groups of 16 or 32: too small for products of codes.
        held, bias = read_blocks(weights, join, takes_e2m1=True)
        matrix = _of_nibbles(held, device) if isinstance(held, NibbleWeight) else _of_bytes(held, device)
        return BuiltMatrix(matrix, in_dtype(bias))
    if quantization is Quantization.W4A16:

        def rounded(part: Tensor, group: int) -> NibbleWeight:
            return round_to_nibbles(part.to(device), group)

        weight, bias = read_nibbles(weights, rounded, dtype, join, of_expert=of_expert)
    elif quantization.keeps_nibbles and weights.codes.keeps_nibbles(of_expert=of_expert):
        weight, bias = read_nibbles(weights, None, weights.code_dtype, join)
    else:
        weight, bias = weights.fused(weights.code_dtype)
    bias = in_dtype(bias)
    if isinstance(weight, NibbleWeight):
        order = None if weight.order is None else weight.order.to(device)
        return BuiltMatrix(_of_nibbles(weight, device), bias, order)
    if quantization is Quantization.FP8:
        return BuiltMatrix(_round_to_float8(weight, weights.outputs, weights.float8_scales), bias)
    codes = _round_to_int8(weight, torch.cat(weights.code_scales))
    if quantization is Quantization.W8A8:
        return BuiltMatrix(codes, bias)
    return BuiltMatrix(WeightOnlyMatrix(pack_codes(codes.codes, 8), 8, codes.codes.shape[1], codes.scales[0]), bias)


def _round_to_int8(weight: Tensor, stored: Tensor) -> CodedMatrix:
    """Rounded with the scales that a checkpoint has, which finds its codes; where it has none, with those of the
    largest number of each output.
    """
    scales, has_all = stored.to(weight.device), bool((stored != 0).all())
    if not has_all:
        scales = torch.where(scales != 0, scales, _largest(weight) / MAX_CODES[torch.int8])
    return _rounded(weight, scales[:, None], torch.int8)


def _round_to_float8(weight: Tensor, widths: Sequence[int], stored: Sequence[Tensor | None]) -> CodedMatrix:
    """As `_round_to_int8`. `stored` are scales [outputs, 1 or groups] of parts of the outputs, of these widths."""
    num_groups = max(1 if scales is None else scales.shape[1] for scales in stored)
    parts = []
    for part, scales in zip(torch.split(weight, list(widths)), stored, strict=True):
        if scales is None:
            scales = _largest(part)[:, None] / MAX_CODES[torch.float8_e4m3fn]
        parts.append(scales.to(weight.device).expand(-1, num_groups))
    return _rounded(weight, torch.cat(parts), torch.float8_e4m3fn)


def _rounded(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> CodedMatrix:
    """`scales` [outputs, 1, or a number for each group of inputs]. Where all numbers of a scale are 0, it is 0."""
    codes = torch.empty_like(weight, dtype=dtype)
    least, most = (-128.0, 127.0) if dtype == torch.int8 else (-MAX_CODES[dtype], MAX_CODES[dtype])
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
    for first in range(0, len(weight), _OUTPUTS):
        rows = slice(first, first + _OUTPUTS)
        of_numbers = divisors[rows]
        if scales.shape[1] > 1:
            of_numbers = of_numbers.repeat_interleave(SCALED_GROUP, 1)[:, : weight.shape[1]]
        numbers = weight[rows].float() / of_numbers
        codes[rows] = (numbers.round() if dtype == torch.int8 else numbers).clamp(least, most).to(dtype)
    return CodedMatrix(codes, scales.t().contiguous())


def _largest(weight: Tensor) -> Tensor:
    """The largest number of each output, float32 [outputs]."""
    largest = torch.empty(len(weight), device=weight.device)
    for first in range(0, len(weight), _OUTPUTS):
        rows = slice(first, first + _OUTPUTS)
        largest[rows] = weight[rows].abs().amax(1)
    return largest


def _of_nibbles(weight: NibbleWeight, device: torch.device) -> WeightOnlyMatrix:
    if weight.is_e2m1:
        words, scales = pack_codes(weight.codes.to(device), 4), _scales(weight.scales, weight.factors, device)
        return WeightOnlyMatrix.in_groups(words, 4, weight.codes.shape[1], weight.group, scales, is_e2m1=True)
    weight = weight if _has_whole_zeros(weight) else weight.with_minimums()
    minimums = _scales(weight.zeros, weight.factors, device) if weight.has_minimums else None
    zeros = None if weight.has_minimums else weight.zeros.to(device).half().t().contiguous()
    words, scales = pack_codes(weight.codes.to(device), 4), _scales(weight.scales, weight.factors, device)
    return WeightOnlyMatrix.in_groups(words, 4, weight.codes.shape[1], weight.group, scales, zeros, minimums)


def _has_whole_zeros(weight: NibbleWeight) -> bool:
    zeros = weight.zeros
    if weight.has_minimums or zeros.is_meta:  # without numbers
        return True
    return bool(((zeros == zeros.round()) & (zeros.abs() <= MOST_ZERO) | zeros.isnan()).all())


def _of_bytes(weight: ByteWeight, device: torch.device) -> WeightOnlyMatrix:
    minimums = None if weight.minimums is None else _scales(weight.minimums, weight.factors, device)
    words, scales = pack_codes(weight.codes.to(device), 8), _scales(weight.scales, weight.factors, device)
    return WeightOnlyMatrix.in_groups(words, 8, weight.codes.shape[1], weight.group, scales, None, minimums)


def _scales(of_groups: Tensor, of_outputs: Tensor | None, device: torch.device) -> GroupScales:
    values, factors = split_scales(of_groups.to(device), None if of_outputs is None else of_outputs.to(device))
    return GroupScales(values.t().contiguous(), factors)
