"""Calls of the kernels of quantized weights: rows in codes, and products in 8 and 4 bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.aot.case import BF16, DTYPE_NAMES, FP8, FP16, FP32, INT8, NUM_ROWS, NUM_TOKENS, Case, empty
from quire_kernels._shapes import SCALED_GROUP
from quire_kernels.activation import Activation
from quire_kernels.coded_rows import CodedRows, RowCoding, code_activation, code_activation_product, code_rows
from quire_kernels.dequantize_weight import dequantize_weight
from quire_kernels.group_by_expert import group_by_expert
from quire_kernels.grouped_linear import choose_tile_rows
from quire_kernels.row_norm import RowNorm, add_row_norm_codes
from quire_kernels.scaled_linear import CodedMatrix, grouped_scaled_linear, scaled_linear
from quire_kernels.weight_only_linear import grouped_weight_only_linear, weight_only_linear
from quire_kernels.weight_only_matrix import WeightOnlyMatrix, num_words

_CODINGS = {"int8": RowCoding(INT8), "fp8": RowCoding(FP8), "fp8 in groups": RowCoding(FP8, SCALED_GROUP)}
_FEW_ROWS, _MEDIUM_ROWS = 8, 32


@dataclass(frozen=True)
class _Weights:
    """The form of a weight in codes."""

    bits: int
    group: int | None
    """Inputs that have one scale; None: all."""
    has_minimums: bool = False
    is_e2m1: bool = False

    def __str__(self) -> str:
        codes = f"{self.bits} bits{' of e2m1' if self.is_e2m1 else ''}"
        groups = "" if self.group is None else f", groups of {self.group}"
        return f"{codes}{groups}{' with minimums' if self.has_minimums else ''}"

    def of(self, inputs: int, outputs: int, *experts: int) -> WeightOnlyMatrix:
        words = empty(*experts, outputs, num_words(inputs, self.bits), dtype=torch.int32)
        factors = empty(*experts, outputs, dtype=FP32)
        if self.group is None:
            return WeightOnlyMatrix(words, self.bits, inputs, factors)
        pairs, minimums = empty(*experts, -(-inputs // self.group), outputs, dtype=torch.int32), None
        if self.has_minimums:
            minimums = factors
        return WeightOnlyMatrix(words, self.bits, inputs, factors, self.group, pairs, minimums, self.is_e2m1)


_MXFP4, _NVFP4 = _Weights(4, 32, is_e2m1=True), _Weights(4, 16, is_e2m1=True)
_WEIGHTS = (
    _Weights(8, None),
    _Weights(8, 32),
    _Weights(4, 128),
    _Weights(4, 32),
    _Weights(4, 32, has_minimums=True),
    _MXFP4,
)


def _norm(width: int, coding: RowCoding) -> None:
    hidden, update = empty(NUM_TOKENS, width, dtype=FP32), empty(NUM_TOKENS, width)
    add_row_norm_codes(hidden, update, RowNorm(empty(width), 1e-5), coding)


def _row_cases() -> Iterator[Case]:
    for name, coding in _CODINGS.items():
        is_fp8 = coding.dtype == FP8
        for width in (576, 4096, 8192):
            call = partial(_norm, width, coding)
            yield Case(
                f"add and RMS norm: {width}, in {name}",
                call,
                needs_fp8=is_fp8,
            )
        for width, activation in ((14336, Activation.SILU), (10240, Activation.GELU_TANH)):
            is_gated = activation is Activation.SILU
            inputs = empty(NUM_TOKENS, width * 2 if is_gated else width)
            yield Case(
                f"{'gated ' if is_gated else ''}{activation.value}: {width}, in {name}",
                partial(code_activation, inputs, activation, coding, is_gated=is_gated),
                needs_fp8=is_fp8,
            )
        gate, vectors = empty(NUM_TOKENS, 256), empty(NUM_TOKENS, 42, 256)[:, 1]
        yield Case(
            f"gelu_tanh times vectors of a layer: 256, in {name}",
            partial(code_activation_product, gate, vectors, Activation.GELU_TANH, coding),
            needs_fp8=is_fp8,
        )
        yield Case(f"rows: 4096, in {name}", partial(code_rows, empty(NUM_TOKENS, 4096), coding), needs_fp8=is_fp8)


def _scaled(inputs: int, outputs: int, coding: RowCoding, num_rows: int, dtype: torch.dtype) -> None:
    groups = coding.num_groups(inputs)
    rows = CodedRows(empty(num_rows, inputs, dtype=coding.dtype), empty(num_rows, groups, dtype=FP32))
    matrix = CodedMatrix(empty(outputs, inputs, dtype=coding.dtype), empty(groups, outputs, dtype=FP32))
    scaled_linear(rows, matrix, None, dtype)


def _weight_only(inputs: int, outputs: int, weights: _Weights, num_rows: int, dtype: torch.dtype) -> None:
    rows, weight = empty(num_rows, inputs, dtype=dtype), weights.of(inputs, outputs)
    # Otherwise torch multiplies many rows.
    weight_only_linear(rows, weight, deterministic=num_rows > _MEDIUM_ROWS)


def _product_cases() -> Iterator[Case]:
    sizes = {"few rows": _FEW_ROWS, "many rows": NUM_ROWS}
    for rows, num_rows in sizes.items():
        for name, coding in _CODINGS.items():
            for inputs, outputs, dtype in ((4096, 6144, BF16), (576, 960, BF16), (4096, 6144, FP16)):
                yield Case(
                    f"product in {name}: {inputs} to {outputs}, {rows}, {DTYPE_NAMES[dtype]}",
                    partial(_scaled, inputs, outputs, coding, num_rows, dtype),
                    needs_fp8=coding.dtype == FP8,
                )
        for weights in _WEIGHTS:
            for inputs, outputs, dtype in ((4096, 6144, BF16), (576, 960, BF16), (4096, 6144, FP32)):
                yield Case(
                    f"product of weights in {weights}: {inputs} to {outputs}, {rows}, {DTYPE_NAMES[dtype]}",
                    partial(_weight_only, inputs, outputs, weights, num_rows, dtype),
                    dtype,
                )
        for name, weights in (
            ("8 bits, groups of 16", _Weights(8, 16)),
            ("4 bits, groups of 16", _Weights(4, 16, has_minimums=True)),
            (str(_NVFP4), _NVFP4),
        ):
            yield Case(
                f"product of weights in {name}: 4096 to 6144, {rows}, bf16",
                partial(_weight_only, 4096, 6144, weights, num_rows, BF16),
            )


def _medium_cases() -> Iterator[Case]:
    for weights in _WEIGHTS:
        yield Case(
            f"product of weights in {weights}: 4096 to 6144, {_MEDIUM_ROWS} rows, bf16",
            partial(_weight_only, 4096, 6144, weights, _MEDIUM_ROWS, BF16),
        )


def _dequantize_cases() -> Iterator[Case]:
    for weights in (
        _Weights(8, None),
        _Weights(8, 32, has_minimums=True),
        _Weights(4, 32),
        _Weights(4, 128),
        _Weights(4, 16, has_minimums=True),
        _MXFP4,
        _NVFP4,
    ):
        yield Case(
            f"numbers of weights in {weights}: 4096 to 6144, bf16",
            partial(dequantize_weight, weights.of(4096, 6144), BF16),
        )


def _experts(num_tokens: int, quantization: str) -> None:
    """The first products of a layer with 128 experts, of which a token has 8."""
    num_experts, hidden, width, num_rows = 128, 2048, 2 * 768, num_tokens * 8
    tile_rows = choose_tile_rows(num_rows, num_experts, BF16, deterministic=False)
    groups = group_by_expert(empty(num_tokens, 8, dtype=torch.int32), num_experts, tile_rows)
    if quantization in ("w8a8", "fp8"):
        dtype = INT8 if quantization == "w8a8" else FP8
        rows = CodedRows(empty(num_tokens, hidden, dtype=dtype), empty(num_tokens, 1, dtype=FP32))
        scales = empty(num_experts, 1, width, dtype=FP32)
        matrix = CodedMatrix(empty(num_experts, width, hidden, dtype=dtype), scales)
        grouped_scaled_linear(rows, matrix, groups, num_rows, BF16)
        return
    weights = {"int8": _Weights(8, None), "w4a16": _Weights(4, 32), "MXFP4": _MXFP4}[quantization]
    only = weights.of(hidden, width, num_experts)
    grouped_weight_only_linear(empty(num_tokens, hidden), only, groups, num_rows)


def _expert_cases() -> Iterator[Case]:
    for quantization in ("int8", "w8a8", "w4a16", "fp8", "MXFP4"):
        for num_tokens in (8, 512):
            yield Case(
                f"128 experts in {quantization}, 8 chosen: {num_tokens} tokens, bf16",
                partial(_experts, num_tokens, quantization),
                needs_fp8=quantization == "fp8",
            )


def quantized_cases() -> Iterator[Case]:
    """All of them, each with a name of its own."""
    yield from _row_cases()
    yield from _product_cases()
    yield from _medium_cases()
    yield from _dequantize_cases()
    yield from _expert_cases()
