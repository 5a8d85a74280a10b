"""Calls of the ops of quantized weights: rows in codes, and products in 8 and 4 bits, also of experts."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.op_call import Arguments, OpCall, Sizes, name_of


def quantized_calls(size: Sizes) -> Iterator[OpCall]:
    """All of them, each with a name of its own."""
    from quire_kernels._shapes import SCALED_GROUP
    from quire_kernels.activation import Activation
    from quire_kernels.coded_rows import (
        RowCoding,
        code_activation,
        code_activation_product,
        code_activation_product_reference,
        code_activation_reference,
        code_rows,
        code_rows_reference,
    )
    from quire_kernels.dequantize_weight import dequantize_weight, dequantize_weight_reference
    from quire_kernels.row_norm import RowNorm, add_row_norm_codes, add_row_norm_codes_reference
    from quire_kernels.scaled_linear import CodedMatrix, scaled_linear, scaled_linear_reference
    from quire_kernels.weight_only_linear import weight_only_linear, weight_only_linear_reference
    from quire_kernels.weight_only_matrix import GroupScales, WeightOnlyMatrix, pack_codes

    width = max(size.width, 2 * SCALED_GROUP)
    outputs = 96 if size.small else 2048

    def normed(coding: RowCoding) -> Arguments:
        hidden, update = size.normal(size.num_tokens, width, dtype=torch.float32), size.normal(size.num_tokens, width)
        return (hidden, update, RowNorm(size.normal(width), 1e-5), coding), {}

    def product(coding: RowCoding) -> Arguments:
        rows = code_rows_reference(size.normal(size.num_tokens, width), coding)
        codes, scales = code_rows_reference(size.normal(outputs, width) * width**-0.5, coding)
        return (rows, CodedMatrix(codes, scales.t().contiguous()), size.normal(outputs), size.dtype), {}

    for coding in (RowCoding(torch.int8), RowCoding(torch.float8_e4m3fn), RowCoding(torch.float8_e4m3fn, SCALED_GROUP)):
        name = name_of(coding.dtype) + ("" if coding.group is None else " in groups")
        # Triton's interpreter cuts codes of float8_e4m3fn off, where a GPU rounds.
        bound = 0.1 if coding.dtype == torch.float8_e4m3fn and size.device.type == "cpu" else OpCall.bound
        yield OpCall(
            f"code_rows in {name}",
            code_rows,
            code_rows_reference,
            lambda coding=coding: ((size.normal(size.num_tokens, width), coding), {}),  # type: ignore[misc]
            bound,
        )
        yield OpCall(
            f"code_activation in {name}",
            code_activation,
            code_activation_reference,
            lambda coding=coding: (  # type: ignore[misc]
                (size.normal(size.num_tokens, 2 * width), Activation.SILU, coding),
                {"is_gated": True},
            ),
            bound,
        )
        yield OpCall(
            f"code_activation_product in {name}",
            code_activation_product,
            code_activation_product_reference,
            lambda coding=coding: ((*size.normal(2, size.num_tokens, width), Activation.GELU_TANH, coding), {}),  # type: ignore[misc]
            bound,
        )
        yield OpCall(
            f"add_row_norm_codes in {name}",
            add_row_norm_codes,
            add_row_norm_codes_reference,
            lambda coding=coding: normed(coding),  # type: ignore[misc]
            bound,
        )
        yield OpCall(
            f"scaled_linear in {name}",
            scaled_linear,
            scaled_linear_reference,
            lambda coding=coding: product(coding),  # type: ignore[misc]
        )

    def weight_only(bits: int, group: int | None, *, is_e2m1: bool = False) -> Arguments:
        inputs = size.normal(size.num_tokens, width)
        words = pack_codes(size.ints(2**bits, outputs, width), bits)
        if group is None:
            return (inputs, WeightOnlyMatrix(words, bits, width, torch.rand(outputs).to(size.device) / 127)), {}
        shape = width // group, outputs
        scales = GroupScales(torch.rand(shape).to(size.device, torch.float16), torch.ones(outputs).to(size.device))
        zeros = size.ints(16, *shape, dtype=torch.float16) if bits == 4 and not is_e2m1 else None
        minimums = None if bits == 4 else scales
        matrix = WeightOnlyMatrix.in_groups(words, bits, width, group, scales, zeros, minimums, is_e2m1=is_e2m1)
        return (inputs, matrix, size.normal(outputs)), {}

    integers = ((8, None, False), (8, 32, False), (4, 32, False), (4, 128, False))
    for bits, group, is_e2m1 in (*integers, (4, 32, True), (4, 16, True)):
        how = f"{bits} bits{' of e2m1' if is_e2m1 else ''}{'' if group is None else f', groups of {group}'}"
        made = partial(weight_only, bits, group, is_e2m1=is_e2m1)
        yield OpCall(f"weight_only_linear, {how}", weight_only_linear, weight_only_linear_reference, made)
        yield OpCall(
            f"dequantize_weight, {how}",
            dequantize_weight,
            dequantize_weight_reference,
            lambda made=made: ((made()[0][1], size.dtype), {}),  # type: ignore[misc]
        )
    yield from _expert_calls(size)


def _expert_calls(size: Sizes) -> Iterator[OpCall]:
    from quire_kernels.coded_rows import RowCoding, code_rows_reference
    from quire_kernels.group_by_expert import ExpertGroups, group_by_expert_reference
    from quire_kernels.grouped_linear import choose_tile_rows
    from quire_kernels.scaled_linear import CodedMatrix, grouped_scaled_linear, grouped_scaled_linear_reference
    from quire_kernels.weight_only_linear import grouped_weight_only_linear, grouped_weight_only_linear_reference
    from quire_kernels.weight_only_matrix import GroupScales, WeightOnlyMatrix, pack_codes

    num_experts, num_chosen, outputs = (4, 2, 96) if size.small else (64, 6, 1536)
    num_rows = size.num_tokens * num_chosen

    def groups() -> ExpertGroups:
        experts = torch.rand(size.num_tokens, num_experts).topk(num_chosen).indices.to(size.device, torch.int32)
        tile_rows = choose_tile_rows(num_rows, num_experts, size.dtype, deterministic=False)
        return group_by_expert_reference(experts, num_experts, tile_rows)

    def scaled(dtype: torch.dtype) -> Arguments:
        coding = RowCoding(dtype)
        rows = code_rows_reference(size.normal(size.num_tokens, size.width), coding)
        codes, scales = code_rows_reference(size.normal(num_experts * outputs, size.width) * size.width**-0.5, coding)
        matrix = CodedMatrix(codes.view(num_experts, outputs, -1), scales.view(num_experts, 1, outputs))
        return (rows, matrix, groups(), num_rows, size.dtype), {}

    for dtype in (torch.int8, torch.float8_e4m3fn):
        yield OpCall(
            f"grouped_scaled_linear in {name_of(dtype)}",
            grouped_scaled_linear,
            grouped_scaled_linear_reference,
            lambda dtype=dtype: scaled(dtype),  # type: ignore[misc]
        )

    def weight_only() -> Arguments:
        words = pack_codes(size.ints(16, num_experts * outputs, size.width), 4).view(num_experts, outputs, -1)
        shape = num_experts, size.width // 32, outputs
        scales = GroupScales(
            torch.rand(shape).to(size.device, torch.float16), torch.rand(num_experts, outputs).to(size.device)
        )
        zeros = size.ints(16, *shape, dtype=torch.float16)
        matrix = WeightOnlyMatrix.in_groups(words, 4, size.width, 32, scales, zeros)
        return (size.normal(size.num_tokens, size.width), matrix, groups(), num_rows), {}

    yield OpCall(
        "grouped_weight_only_linear, 4 bits",
        grouped_weight_only_linear,
        grouped_weight_only_linear_reference,
        weight_only,
    )
